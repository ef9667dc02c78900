// Python face of gio_uring: GioRing.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <tuple>

#include "bind.h"
#include "nvme.h"
#include "tutti/gio_ring.h"

namespace tutti {
namespace {

constexpr double kWaitSecondsMax = 86'400;
/// Ctrl-C reaches a waiting main thread after at most this long.
constexpr u64 kSignalCheckNs = 200'000'000;

u64 to_ns(double seconds) {
    return seconds > 0 ? u64(std::min(seconds, kWaitSecondsMax) * 1e9) : 0;  // NaN becomes 0
}

class PyRing {
public:
    PyRing(const std::vector<std::tuple<PyController*, u32>>& devices, u32 depth, u32 threads,
           double timeout_s) {
        std::vector<gio::Target> targets;
        for (const auto& [controller, nsid] : devices) {
            if (controller == nullptr || controller->handle == nullptr)
                raise_os_error(-EBADF, "a controller is closed");
            handles_.push_back(controller->handle);
            targets.push_back(
                {controller->handle->controller.get(), controller->handle->memory.get(), nsid});
        }
        gio::RingOptions options;
        options.depth = depth;
        options.threads = std::min(threads, 64u);
        options.timeout_ns = to_ns(timeout_s);
        nvme::Failure failure;
        {
            nb::gil_scoped_release unlocked;
            ring_ = gio::Ring::open(targets, options, failure);
        }
        if (ring_ == nullptr) raise_os_error(failure.code, failure.what);
    }

    ~PyRing() {
        if (!owner_.here()) {  // its threads are the parent's
            (void)ring_.release();
            return;
        }
        nb::gil_scoped_release unlocked;
        ring_.reset();
        handles_.clear();
    }

    std::vector<u32> get_iocb(u32 count) {
        std::vector<u32> ids(std::min(count, gio::kDepthMax + 1));
        if (open().get_iocb(ids) != 0) ids.clear();
        return ids;
    }

    int prepare(u32 iocb, int op, const In<u32>& device, const In<u64>& offset_bytes,
                const In<u64>& address, const In<u64>& length_bytes) {
        if (op != 0 && op != 1) return -EINVAL;
        gio::Ring& ring = open();
        const gio::FragmentArrays fragments{view(device), view(offset_bytes), view(address),
                                            view(length_bytes)};
        nb::gil_scoped_release unlocked;
        return ring.prepare(iocb, op == 0 ? nvme::Io::kRead : nvme::Io::kWrite, fragments);
    }

    int put_back(u32 iocb) { return open().put_back(iocb); }

    int issue_io(const In<u32>& iocbs, u32 sms) {
        gio::Ring& ring = open();
        nb::gil_scoped_release unlocked;
        return ring.issue_io(view(iocbs), sms, launch_);
    }

    nb::bytes launch() const {
        return nb::bytes(reinterpret_cast<const char*>(&launch_), sizeof launch_);
    }

    int refuse(const In<u32>& iocbs) { return open().refuse(view(iocbs)); }

    nb::object wait_cqe(u32 iocb, double timeout_s) {
        gio::Ring& ring = open();
        const u64 end_ns = now_ns() + to_ns(timeout_s);
        std::vector<u32> statuses;
        for (;;) {
            const u64 now = now_ns();
            const u64 turn = now < end_ns ? std::min(end_ns - now, kSignalCheckNs) : 0;
            Status status = 0;
            {
                nb::gil_scoped_release unlocked;
                status = ring.wait_cqe(iocb, turn, statuses);
            }
            if (status == 0) return nb::cast(to_numpy(std::move(statuses)));
            if (status != -ETIME) raise_os_error(status, "this IOCB was not issued");
            if (now_ns() >= end_ns) return nb::none();
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
    }

    void reset_device(u32 device, double timeout_s) {
        gio::Ring& ring = open();
        std::string what;
        Status status = 0;
        {
            nb::gil_scoped_release unlocked;
            status = ring.reset_device(device, to_ns(timeout_s), what);
        }
        if (status != 0) raise_os_error(status, what);
    }

    std::uintptr_t view_address() { return reinterpret_cast<std::uintptr_t>(&open().view()); }

    std::vector<std::tuple<u64, u64, std::string>> shared_ranges() {
        SharedRanges ranges;
        open().list_shared(ranges);
        std::vector<std::tuple<u64, u64, std::string>> result;
        for (const SharedRange& range : ranges)
            result.emplace_back(range.address, range.length_bytes,
                                range.registers ? "registers" : "memory");
        return result;
    }

    u64 shared_version() { return open().shared_version(); }

    nb::dict stats() {
        const gio::RingStats s = open().stats();
        nb::dict d;
        d["launches"] = s.launches;
        d["iocbs"] = s.iocbs;
        d["fragments"] = s.fragments;
        d["refused_fragments"] = s.refused_fragments;
        d["failed_fragments"] = s.failed_fragments;
        d["timeouts"] = s.timeouts;
        d["resets"] = s.resets;
        return d;
    }

    void close() {
        if (ring_ == nullptr || !owner_.here()) return;
        nb::gil_scoped_release unlocked;
        ring_->close();
    }

private:
    gio::Ring& open() {
        if (!owner_.here()) raise_os_error(-EBADF, "the ring belongs to the parent process");
        return *ring_;
    }

    std::vector<std::shared_ptr<NvmeHandle>> handles_;
    std::unique_ptr<gio::Ring> ring_;
    gio::Launch launch_{};
    Owner owner_;
};

}  // namespace

void bind_gio(nb::module_& m) {
    m.attr("GIO_FRAGMENTS_MAX") = gio::kFragmentsMax;
    m.attr("GIO_DEPTH_MAX") = gio::kDepthMax;
    nb::class_<PyRing>(m, "GioRing")
        .def(nb::init<const std::vector<std::tuple<PyController*, u32>>&, u32, u32, double>(),
             "devices"_a, nb::kw_only(), "depth"_a, "threads"_a, "timeout_s"_a)
        .def("get_iocb", &PyRing::get_iocb, "count"_a)
        .def("prepare", &PyRing::prepare, "iocb"_a, "op"_a, "device"_a.noconvert(),
             "offset_bytes"_a.noconvert(), "address"_a.noconvert(), "length_bytes"_a.noconvert())
        .def("put_back", &PyRing::put_back, "iocb"_a)
        .def("issue_io", &PyRing::issue_io, "iocbs"_a.noconvert(), "sms"_a)
        .def("launch", &PyRing::launch)
        .def("refuse", &PyRing::refuse, "iocbs"_a.noconvert())
        .def("wait_cqe", &PyRing::wait_cqe, "iocb"_a, "timeout_s"_a)
        .def("reset_device", &PyRing::reset_device, "device"_a, "timeout_s"_a)
        .def("view_address", &PyRing::view_address)
        .def("shared_ranges", &PyRing::shared_ranges)
        .def("shared_version", &PyRing::shared_version)
        .def("stats", &PyRing::stats)
        .def("close", &PyRing::close);
}

}  // namespace tutti
