#!/busybox sh
# /init of the guests. Kernel arguments: tutti.suite=NAME, and tutti.bind=ADDRESS,... for the NVMe
# functions that go to vfio-pci; with tutti.bind=none they only lose their driver.
# Results go to the second serial port, so that nothing of the kernel's gets between them.
/busybox mkdir -p /bin /proc /sys /dev /tmp
/busybox --install -s /bin
export PATH=/bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null

suite= bind=
for word in $(cat /proc/cmdline); do
    case $word in
        tutti.suite=*) suite=${word#tutti.suite=} ;;
        tutti.bind=*) bind=$(echo "${word#tutti.bind=}" | tr , ' ') ;;
    esac
done

devices=/sys/bus/pci/devices
let_go() { [ ! -e "$devices/$1/driver" ] || echo "$1" >"$devices/$1/driver/unbind"; }

if [ "$bind" = none ]; then
    echo 24 >/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
    for class in "$devices"/*/class; do
        [ "$(cat "$class")" != 0x010802 ] || let_go "$(basename "$(dirname "$class")")"
    done
else
    for module in $(cat /modules/order); do insmod "/modules/$module"; done
    for address in $bind; do
        let_go "$address"
        echo vfio-pci >"$devices/$address/driver_override"
        echo "$address" >/sys/bus/pci/drivers_probe
    done
fi
echo "GUEST kernel $(uname -r), $(cut -d' ' -f1 /proc/uptime) s to user space"
code=22
if [ -x /suite.sh ]; then
    /suite.sh "$suite" >/dev/ttyS1 && code=21
else
    /guest_nvme "$suite" >/dev/ttyS1 && code=21
fi
sync
/guest_nvme exit "$code"
poweroff -f
