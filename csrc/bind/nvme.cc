// Python face of NVMe controllers: SoftController and NvmeController.
#include "nvme.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <stdexcept>
#include <tuple>

#include "bind.h"

namespace tutti {
namespace {

using nvme::SoftFault;

constexpr std::array<std::pair<const char*, SoftFault::Kind>, 14> kFaultKinds{{
    {"status", SoftFault::Kind::kStatus},
    {"drop", SoftFault::Kind::kDrop},
    {"lose", SoftFault::Kind::kLose},
    {"delay", SoftFault::Kind::kDelay},
    {"hold", SoftFault::Kind::kHold},
    {"repeat", SoftFault::Kind::kRepeat},
    {"torn", SoftFault::Kind::kTorn},
    {"wrong_id", SoftFault::Kind::kWrongId},
    {"wrong_queue", SoftFault::Kind::kWrongQueue},
    {"wrong_head", SoftFault::Kind::kWrongHead},
    {"short", SoftFault::Kind::kShort},
    {"flip", SoftFault::Kind::kFlip},
    {"fatal", SoftFault::Kind::kFatal},
    {"gone", SoftFault::Kind::kGone},
}};

constexpr double kTimeoutSecondsMax = 86'400;

u64 to_ns(double seconds) {
    return seconds > 0 ? u64(std::min(seconds, kTimeoutSecondsMax) * 1e9) : 0;  // NaN becomes 0
}

/// A SoftController. It goes on until the last controller that is open on it is gone.
class PySoft {
public:
    PySoft(u64 namespace_bytes, u32 namespace_count, u32 block_bytes, u32 transfer_shift,
           u32 queue_entries_max, u32 queue_pairs_max, bool sgl, bool shadow_doorbells,
           const std::string& serial, const std::vector<int>& files, bool null_backend,
           const std::string& cuda_library) {
        const bool blocks = block_bytes == 512 || block_bytes == 4096;
        if (!blocks || namespace_bytes == 0 || namespace_bytes % block_bytes != 0 ||
            namespace_count < 1 || namespace_count > nvme::kSoftNamespacesMax ||
            (!files.empty() && files.size() != namespace_count) || transfer_shift > 16 ||
            queue_entries_max < 2 || queue_entries_max > nvme::kSoftEntriesMax ||
            queue_pairs_max < 1 || queue_pairs_max >= nvme::kSoftQueuesMax || serial.size() > 20)
            throw std::invalid_argument("an option of the software controller is out of bounds");
        nvme::SoftOptions options;
        options.namespace_bytes = namespace_bytes;
        options.namespace_count = namespace_count;
        options.block_bytes = block_bytes;
        options.transfer_shift = transfer_shift;
        options.queue_entries_max = queue_entries_max;
        options.queue_pairs_max = queue_pairs_max;
        options.sgl = sgl;
        options.shadow_doorbells = shadow_doorbells;
        options.serial = serial;
        options.files = files;
        options.null_backend = null_backend;
        options.cuda_library = cuda_library;
        options_ = options;
        Status status = 0;
        {
            nb::gil_scoped_release unlocked;
            soft_ = std::make_shared<nvme::SoftController>(options);
            status = soft_->start();
        }
        if (status != 0) {
            const std::string& why = soft_->why();
            raise_os_error(
                status, "the software controller does not start" + (why.empty() ? "" : ": " + why));
        }
    }
    ~PySoft() {
        if (!owner_.here()) {  // its thread is the parent's
            new std::shared_ptr<nvme::SoftController>(std::move(soft_));
            return;
        }
        nb::gil_scoped_release unlocked;
        soft_.reset();
    }

    void inject(const std::string& kind, u32 queue, int opcode, u32 skip, u32 count, u32 status,
                u32 turns) {
        if (count == 0) throw std::invalid_argument("a fault strikes once at least");
        for (const auto& [name, value] : kFaultKinds) {
            if (kind == name)
                return open().inject({value, queue, opcode, skip, count, status, turns});
        }
        throw std::invalid_argument("there is no fault called " + kind);
    }
    void clear_faults() { open().clear_faults(); }
    void release() { open().release(); }
    void plug_in() { open().plug_in(); }

    nb::dict stats() {
        const nvme::SoftStats s = open().stats();
        nb::dict d;
        d["commands"] = s.commands;
        d["faults"] = s.faults;
        d["bad_pointers"] = s.bad_pointers;
        d["unmapped"] = s.unmapped;
        d["doorbells"] = s.doorbells;
        return d;
    }

    nb::object media(u32 nsid) {
        nvme::SoftController& soft = open();
        if (nsid < 1 || nsid > options_.namespace_count || !options_.files.empty() ||
            options_.null_backend)
            throw std::invalid_argument("there is no such namespace in memory");
        struct Kept {
            std::shared_ptr<nvme::SoftController> soft;
            Owner owner;
        };
        nb::capsule guard(new Kept{soft_, owner_}, [](void* p) noexcept {
            auto* kept = static_cast<Kept*>(p);
            if (!kept->owner.here()) return;  // its thread is the parent's
            nb::gil_scoped_release unlocked;
            delete kept;
        });
        return nb::cast(Out<std::uint8_t>(soft.media(nsid), {options_.namespace_bytes}, guard));
    }

    void close() {
        if (!owner_.here()) return;
        nb::gil_scoped_release unlocked;
        soft_.reset();
    }

    std::shared_ptr<nvme::SoftController> shared() {
        open();
        return soft_;
    }

private:
    nvme::SoftController& open() {
        if (soft_ == nullptr || !owner_.here())
            raise_os_error(-EBADF, "the software controller is closed");
        return *soft_;
    }

    nvme::SoftOptions options_;
    std::shared_ptr<nvme::SoftController> soft_;
    Owner owner_;
};

nvme::Failure open_access(const nb::object& device, const std::string& access, NvmeHandle& handle) {
    if (access == "soft") {
        handle.soft = nb::cast<PySoft&>(device).shared();
        handle.access = std::make_unique<nvme::SoftAccess>(*handle.soft);
        return {};
    }
    const std::string address = nb::cast<std::string>(device);
    nvme::Failure failure;
    nb::gil_scoped_release unlocked;
    if (access == "vfio") handle.access = nvme::VfioAccess::open(address, failure);
    if (access == "sysfs") handle.access = nvme::SysfsAccess::open(address, failure);
    if (handle.access == nullptr && !failure)
        failure = {-EINVAL, 0, "access is soft, vfio or sysfs, not " + access};
    return failure;
}

void init_controller(PyController* self, const nb::object& device, const std::string& access,
                     u32 queue_pairs, u32 queue_entries, u32 commands_max, bool shadow_doorbells,
                     double admin_timeout_s) {
    auto handle = std::make_shared<NvmeHandle>();
    nvme::Failure failure = open_access(device, access, *handle);
    if (!failure) {
        nb::gil_scoped_release unlocked;
        handle->memory = std::make_unique<nvme::MemoryTable>(*handle->access);
        handle->controller = std::make_unique<nvme::Controller>(*handle->access);
        if (const Status status = handle->memory->start()) failure = {status, 0, "no memory"};
        nvme::ControllerOptions options;
        options.queue_pairs = queue_pairs;
        options.queue_entries = queue_entries;
        options.commands_max = commands_max;
        options.shadow_doorbells = shadow_doorbells;
        options.admin_timeout_ns = to_ns(admin_timeout_s);
        if (!failure) failure = handle->controller->open(options);
        if (failure) handle.reset();
    }
    if (failure) raise_os_error(failure.code, failure.what);
    new (self) PyController{std::move(handle)};
}

NvmeHandle& open(PyController& self) {
    if (self.handle == nullptr || !self.handle->owner.here())
        raise_os_error(-EBADF, "the controller is closed");
    return *self.handle;
}

nb::dict facts(PyController& self) {
    const nvme::ControllerFacts& f = open(self).controller->facts();
    nb::list namespaces;
    for (const nvme::Namespace& one : f.namespaces) {
        nb::dict d;
        d["nsid"] = one.id;
        d["blocks"] = one.blocks;
        d["block_bytes"] = one.block_bytes;
        d["metadata_bytes"] = one.metadata_bytes;
        namespaces.append(d);
    }
    nb::dict d;
    d["serial"] = f.serial;
    d["model"] = f.model;
    d["firmware"] = f.firmware;
    d["version"] = f.version;
    d["transfer_bytes_max"] = f.transfer_bytes_max;
    d["queue_entries_max"] = f.queue_entries_max;
    d["queue_pairs_max"] = f.queue_pairs_max;
    d["queue_pairs"] = self.handle->controller->queue_count();
    d["sgl"] = f.sgl;
    d["shadow_doorbells"] = f.shadow_doorbells;
    d["namespaces"] = namespaces;
    return d;
}

nb::dict stats(PyController& self) {
    nvme::Controller& controller = *open(self).controller;
    nvme::QueueStats sum{};
    for (u32 at = 0; at < controller.queue_count(); ++at) {
        const nvme::QueueStats s = controller.queue(at).stats();
        sum.sq_doorbells += s.sq_doorbells;
        sum.sq_doorbells_elided += s.sq_doorbells_elided;
        sum.cq_doorbells += s.cq_doorbells;
        sum.cq_doorbells_elided += s.cq_doorbells_elided;
        sum.completions += s.completions;
        sum.unknown += s.unknown;
        sum.bad_head += s.bad_head;
        sum.late += s.late;
    }
    nb::dict d;
    d["sq_doorbells"] = sum.sq_doorbells;
    d["sq_doorbells_elided"] = sum.sq_doorbells_elided;
    d["cq_doorbells"] = sum.cq_doorbells;
    d["cq_doorbells_elided"] = sum.cq_doorbells_elided;
    d["completions"] = sum.completions;
    d["unknown"] = sum.unknown;
    d["bad_head"] = sum.bad_head;
    d["late"] = sum.late;
    return d;
}

void reset(PyController& self) {
    NvmeHandle& handle = open(self);
    nvme::Failure failure;
    {
        nb::gil_scoped_release unlocked;
        failure = handle.controller->reset();
        if (!failure) handle.memory->reclaim();
    }
    if (failure) raise_os_error(failure.code, failure.what);
}

bool abort(PyController& self, u32 queue, u32 command_id) {
    NvmeHandle& handle = open(self);
    bool aborted = false;
    nvme::Failure failure;
    {
        nb::gil_scoped_release unlocked;
        failure = handle.controller->abort(queue, command_id, aborted);
    }
    if (failure) raise_os_error(failure.code, failure.what);
    return aborted;
}

std::int64_t register_memory(PyController& self, u64 address, u64 length_bytes) {
    NvmeHandle& handle = open(self);
    nb::gil_scoped_release unlocked;
    return handle.memory->add(address, length_bytes);
}

int unregister_memory(PyController& self, std::int64_t region) {
    NvmeHandle& handle = open(self);
    nb::gil_scoped_release unlocked;
    return handle.memory->remove(region);
}

u32 flush(PyController& self, u32 nsid, double timeout_s) {
    NvmeHandle& handle = open(self);
    nb::gil_scoped_release unlocked;
    return handle.controller->flush(nsid, to_ns(timeout_s));
}

using Buffer = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

u32 read(PyController& self, u32 nsid, u64 offset_bytes, const Buffer& buffer, double timeout_s) {
    NvmeHandle& handle = open(self);
    nb::gil_scoped_release unlocked;
    return handle.controller->transfer(nvme::Io::kRead, nsid, offset_bytes, buffer.data(),
                                       buffer.shape(0), to_ns(timeout_s));
}

u32 write(PyController& self, u32 nsid, u64 offset_bytes, const In<std::uint8_t>& buffer,
          double timeout_s) {
    NvmeHandle& handle = open(self);
    nb::gil_scoped_release unlocked;
    return handle.controller->transfer(nvme::Io::kWrite, nsid, offset_bytes,
                                       const_cast<std::uint8_t*>(buffer.data()), buffer.shape(0),
                                       to_ns(timeout_s));
}

std::vector<std::tuple<u64, u64, std::string>> shared_ranges(PyController& self) {
    NvmeHandle& handle = open(self);
    SharedRanges ranges;
    handle.controller->list_shared(ranges);
    handle.memory->list_shared(ranges);
    std::vector<std::tuple<u64, u64, std::string>> result;
    for (const SharedRange& range : ranges)
        result.emplace_back(range.address, range.length_bytes,
                            range.registers ? "registers" : "memory");
    return result;
}

void close(PyController& self) {
    if (self.handle == nullptr) return;
    if (!self.handle->owner.here()) {
        self.handle.reset();
        return;
    }
    nb::gil_scoped_release unlocked;
    self.handle->controller->close();
    self.handle.reset();
}

}  // namespace

void bind_nvme(nb::module_& m) {
    nb::class_<PySoft>(m, "SoftController")
        .def(nb::init<u64, u32, u32, u32, u32, u32, bool, bool, const std::string&,
                      const std::vector<int>&, bool, const std::string&>(),
             nb::kw_only(), "namespace_bytes"_a, "namespace_count"_a = 1, "block_bytes"_a = 512,
             "transfer_shift"_a = 7, "queue_entries_max"_a = 1024, "queue_pairs_max"_a = 64,
             "sgl"_a = true, "shadow_doorbells"_a = true, "serial"_a = "TUTTI-SOFT-1",
             "files"_a = std::vector<int>{}, "null_backend"_a = false, "cuda_library"_a = "")
        .def("inject", &PySoft::inject, "kind"_a, nb::kw_only(), "queue"_a = 0, "opcode"_a = -1,
             "skip"_a = 0, "count"_a = 1, "status"_a = 0, "turns"_a = 0)
        .def("clear_faults", &PySoft::clear_faults)
        .def("release", &PySoft::release)
        .def("plug_in", &PySoft::plug_in)
        .def("stats", &PySoft::stats)
        .def("media", &PySoft::media, "nsid"_a)
        .def("close", &PySoft::close);
    nb::class_<PyController>(m, "NvmeController")
        .def("__init__", &init_controller, "device"_a, nb::kw_only(), "access"_a = "soft",
             "queue_pairs"_a = 1, "queue_entries"_a = 256, "commands_max"_a = 0,
             "shadow_doorbells"_a = true, "admin_timeout_s"_a = 10.0)
        .def("facts", &facts)
        .def("stats", &stats)
        .def("dead", [](PyController& self) { return open(self).controller->dead(); })
        .def("reset", &reset)
        .def("abort", &abort, "queue"_a, "command_id"_a)
        .def("register_memory", &register_memory, "address"_a, "length_bytes"_a)
        .def("unregister_memory", &unregister_memory, "region"_a)
        .def("flush", &flush, "nsid"_a, "timeout_s"_a)
        .def("read", &read, "nsid"_a, "offset_bytes"_a, "buffer"_a.noconvert(), "timeout_s"_a)
        .def("write", &write, "nsid"_a, "offset_bytes"_a, "buffer"_a.noconvert(), "timeout_s"_a)
        .def("shared_ranges", &shared_ranges)
        .def("close", &close);
}

}  // namespace tutti
