#!/usr/bin/env bash
# Usage: fetch.sh DIRECTORY
#
# Gets QEMU, a kernel for its guests and a static busybox with apt, and unpacks them in DIRECTORY;
# nothing is installed. apt checks signatures and checksums. About 45 MB are fetched, once; needs
# Debian 12 or newer on x86-64, network, and no root.
#
# DIRECTORY afterwards: root/ (QEMU and what it needs that this system lacks), kernel/ (boot/ and
# lib/modules/), busybox, and `ready`, which names the versions and is written last.
# Exits 77 where apt cannot deliver, saying why.
set -euo pipefail
directory=${1:?usage: fetch.sh DIRECTORY}
mkdir -p "$directory"
cd "$directory"
[ -f ready ] && exit 0

unavailable() { printf 'fetch.sh: %s\n' "$*" >&2; exit 77; }

[ "$(uname -m)" = x86_64 ] || unavailable "for x86-64 only"
command -v apt-get >/dev/null || unavailable "no apt-get here"
rm -rf apt root kernel busybox
mkdir -p apt/lists/partial apt/archives/partial apt/cache apt/kernel

# Lists and downloads of its own, so that the system's stay as they are and nobody waits for locks.
options=(-qq -o Dir::State::Lists="$PWD/apt/lists" -o Dir::Cache="$PWD/apt/cache"
    -o Dir::Cache::archives="$PWD/apt/archives" -o APT::Sandbox::User= -o Debug::NoLocking=1
    -o Acquire::Retries=3 -o Acquire::http::Timeout=30)

timeout 120 apt-get "${options[@]}" update >&2 || unavailable "apt-get update failed"
# What of QEMU's libraries is installed already is not fetched again.
timeout 300 apt-get "${options[@]}" install --download-only --reinstall --no-install-recommends -y \
    qemu-system-x86 qemu-system-common qemu-system-data seabios busybox-static >/dev/null ||
    unavailable "QEMU cannot be fetched"
# Debian's kernel for clouds: a third of the full one; NVMe and the IOMMU are built in.
kernel=$(apt-cache "${options[@]}" depends linux-image-cloud-amd64 | awk '/Depends:/ {print $2; exit}')
[ -n "$kernel" ] || unavailable "apt knows no linux-image-cloud-amd64"
(cd apt/kernel && timeout 300 apt-get "${options[@]}" download "$kernel" >&2) ||
    unavailable "the kernel $kernel cannot be fetched"

for package in apt/archives/*.deb; do dpkg -x "$package" root; done
dpkg -x apt/kernel/*.deb kernel
cp root/bin/busybox busybox 2>/dev/null || cp root/usr/bin/busybox busybox
version=$(dpkg-deb -f apt/archives/qemu-system-x86_*.deb Version)
rm -rf apt kernel/usr
echo "QEMU $version, $kernel" >ready
