// Python face of the native code: tutti_core._native.
//
// Checks shapes, lets go of the GIL, calls. The typed description is tutti_core/_native.pyi.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "tutti/copy.h"
#include "tutti/hash.h"
#include "tutti/uring_engine.h"

namespace tutti {
namespace {

const std::uint8_t* bytes_of(const nb::bytes& value) {
    return reinterpret_cast<const std::uint8_t*>(value.c_str());
}

nb::bytes new_bytes(std::size_t size) {
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (made == nullptr) throw nb::python_error();
    return nb::steal<nb::bytes>(made);
}

// Writable until it is handed out: nobody else has seen the object yet.
std::uint8_t* payload_of(nb::bytes& value) {
    return reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(value.ptr()));
}

nb::bytes py_chain_keys(const nb::bytes& seed, const In<std::uint32_t>& tokens,
                        std::int64_t page_tokens) {
    if (page_tokens < 1) throw std::invalid_argument("page_tokens must be at least 1");
    const auto per_page = static_cast<std::size_t>(page_tokens);
    const std::size_t page_count = tokens.shape(0) / per_page;
    nb::bytes keys = new_bytes(page_count * kKeyBytes);
    std::uint8_t* out = payload_of(keys);
    {
        nb::gil_scoped_release unlocked;
        chain_keys(bytes_of(seed), seed.size(), tokens.data(), page_count, per_page, out);
    }
    return keys;
}

nb::bytes py_record_keys(const nb::bytes& prefix, const nb::bytes& keys, std::int64_t width) {
    if (width < 1 || keys.size() % static_cast<std::size_t>(width) != 0) {
        throw std::invalid_argument("keys must be a whole number of keys of `width` >= 1 bytes");
    }
    const auto key_bytes = static_cast<std::size_t>(width);
    const std::size_t key_count = keys.size() / key_bytes;
    nb::bytes out = new_bytes(key_count * kKeyBytes);
    std::uint8_t* payload = payload_of(out);
    {
        nb::gil_scoped_release unlocked;
        record_keys(bytes_of(prefix), prefix.size(), bytes_of(keys), key_count, key_bytes, payload);
    }
    return out;
}

Out<std::uint64_t> py_checksum_items(const In<std::uint32_t>& fragment_start,
                                     const In<std::uint64_t>& address,
                                     const In<std::uint64_t>& length_bytes) {
    const std::size_t m = address.shape(0);
    if (fragment_start.shape(0) < 1 || length_bytes.shape(0) != m) {
        throw std::invalid_argument("the arrays have different lengths");
    }
    const std::size_t n = fragment_start.shape(0) - 1;
    std::vector<std::uint64_t> sums(n);
    bool rising = true;
    {
        nb::gil_scoped_release unlocked;
        for (std::size_t i = 0; i < n && rising; ++i) {
            const std::uint32_t first = fragment_start.data()[i];
            const std::uint32_t last = fragment_start.data()[i + 1];
            rising = first <= last && last <= m;
            if (!rising) break;
            sums[i] = checksum({address.data() + first, length_bytes.data() + first, last - first});
        }
    }
    if (!rising) throw std::invalid_argument("fragment_start must rise within the fragments");
    return to_numpy(std::move(sums));
}

void py_copy_pieces(const In<std::uint64_t>& target, const In<std::uint64_t>& source,
                    const In<std::uint64_t>& length_bytes) {
    const std::size_t count = target.shape(0);
    if (source.shape(0) != count || length_bytes.shape(0) != count) {
        throw std::invalid_argument("the arrays have different lengths");
    }
    nb::gil_scoped_release unlocked;
    copy_pieces(target.data(), source.data(), length_bytes.data(), count);
}

/// Longer waits, infinite ones too, come back early.
constexpr double kWaitSecondsMax = 86'400;
/// Ctrl-C reaches a waiting main thread after at most this long.
constexpr std::chrono::milliseconds kSignalCheck{200};

/// UringEngine with Python's types. Owns the engine, except in a forked child, where it is leaked:
/// its destructor would wait for threads that do not exist there.
class PyEngine {
public:
    PyEngine(const std::vector<std::string>& paths, const std::vector<std::uint64_t>& capacities,
             std::uint32_t queue_depth, std::uint64_t transfer_bytes_max,
             std::uint64_t bounce_bytes, std::uint64_t first_attempt_bytes) {
        const bool whole = transfer_bytes_max % kBlockBytes == 0 &&
                           bounce_bytes % kBlockBytes == 0 && first_attempt_bytes % 512 == 0;
        const bool bounded = queue_depth >= 1 && queue_depth <= kQueueDepthMax &&
                             transfer_bytes_max >= kBlockBytes &&
                             transfer_bytes_max <= kTransferBytesMax && bounce_bytes >= kBlockBytes;
        if (paths.empty() || paths.size() != capacities.size() || !whole || !bounded) {
            throw std::invalid_argument("an option of the engine is out of bounds");
        }
        std::vector<DeviceSpec> devices;
        for (std::size_t i = 0; i < paths.size(); ++i) {
            if (capacities[i] >= std::uint64_t{1} << 63) {
                throw std::invalid_argument("a capacity is beyond 2**63 - 1");
            }
            devices.push_back({paths[i], capacities[i]});
        }
        const RingOptions options{queue_depth, transfer_bytes_max, bounce_bytes,
                                  first_attempt_bytes};
        OpenFailure failure;
        {
            nb::gil_scoped_release unlocked;
            engine_ = UringEngine::open(devices, options, failure);
        }
        if (engine_ == nullptr) {  // OSError(errno, step, path)
            nb::object args = nb::make_tuple(-failure.status, failure.what, failure.path);
            PyErr_SetObject(PyExc_OSError, args.ptr());
            throw nb::python_error();
        }
    }

    ~PyEngine() {
        if (engine_ != nullptr && engine_->forked()) (void)engine_.release();
    }

    std::int64_t submit(int op, const In<std::uint32_t>& device,
                        const In<std::uint64_t>& offset_bytes,
                        const In<std::uint32_t>& fragment_start, const In<std::uint64_t>& address,
                        const In<std::uint64_t>& length_bytes, bool with_checksum) {
        if (op != 0 && op != 1) return -EINVAL;
        const BatchView batch{static_cast<Op>(op), with_checksum,        view(device),
                              view(offset_bytes),  view(fragment_start), view(address),
                              view(length_bytes)};
        nb::gil_scoped_release unlocked;
        return engine_->submit(batch);
    }

    nb::object wait(std::int64_t ticket, double timeout_s) {
        using Clock = std::chrono::steady_clock;
        // Written so that NaN becomes 0.
        const double seconds = timeout_s > 0 ? std::min(timeout_s, kWaitSecondsMax) : 0;
        const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double>(seconds));
        std::shared_ptr<Batch> batch;
        Status status = 0;
        for (;;) {
            const auto turn = std::min(end, Clock::now() + kSignalCheck);
            {
                nb::gil_scoped_release unlocked;
                status = engine_->wait(ticket, turn, batch);
            }
            if (status != -ETIME || turn == end) break;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
        if (status == -ETIME) return nb::none();
        if (status < 0) return nb::int_(status);
        return nb::make_tuple(to_numpy(std::move(batch->status)),
                              to_numpy(std::move(batch->checksums)));
    }

    int flush(std::uint32_t device) {
        nb::gil_scoped_release unlocked;
        return engine_->flush(device);
    }

    int replace_file(std::uint32_t device, int fd) {
        nb::gil_scoped_release unlocked;
        return engine_->replace_file(device, fd);
    }

    std::int64_t register_memory(std::uint64_t address, std::uint64_t length_bytes) {
        nb::gil_scoped_release unlocked;
        return engine_->register_memory(address, length_bytes);
    }

    int unregister_memory(std::int64_t region) {
        nb::gil_scoped_release unlocked;
        return engine_->unregister_memory(region);
    }

    void close() {
        nb::gil_scoped_release unlocked;
        engine_->close();
    }

    nb::dict stats() const {
        const EngineStats s = engine_->stats();
        nb::dict d;
        d["read_items"] = s.read_items;
        d["read_bytes"] = s.read_bytes;
        d["write_items"] = s.write_items;
        d["write_bytes"] = s.write_bytes;
        d["failed_items"] = s.failed_items;
        d["bounced_bytes"] = s.bounced_bytes;
        d["short_transfers"] = s.short_transfers;
        d["flushes"] = s.flushes;
        d["transfers"] = s.transfers;
        d["fixed_transfers"] = s.fixed_transfers;
        d["enters"] = s.enters;
        d["device_items"] = s.device_items;
        return d;
    }

    nb::dict grants() const {
        const EngineGrants g = engine_->grants();
        nb::dict d;
        d["registered_files"] = g.registered_files;
        d["registered_buffers"] = g.registered_buffers;
        d["registered_regions"] = g.registered_regions;
        d["memory_align"] = g.memory_align;
        return d;
    }

private:
    std::unique_ptr<UringEngine> engine_;
};

}  // namespace
}  // namespace tutti

NB_MODULE(_native, m) {
    using namespace tutti;
    // An engine that lives to the end of the interpreter is no leak worth a report to users.
    nb::set_leak_warnings(false);
    m.doc() = "Native parts of tutti: hashing, copies and the io_uring engine.";
    m.def("chain_keys", &py_chain_keys, "seed"_a, "tokens"_a.noconvert(), "page_tokens"_a);
    m.def("record_keys", &py_record_keys, "prefix"_a, "keys"_a, "width"_a);
    m.def("checksum_items", &py_checksum_items, "fragment_start"_a.noconvert(),
          "address"_a.noconvert(), "length_bytes"_a.noconvert());
    m.def("copy_pieces", &py_copy_pieces, "target"_a.noconvert(), "source"_a.noconvert(),
          "length_bytes"_a.noconvert());

    m.attr("QUEUE_DEPTH_MAX") = kQueueDepthMax;
    m.attr("TRANSFER_BYTES_MAX") = kTransferBytesMax;
    nb::class_<PyEngine>(m, "UringEngine")
        .def(nb::init<const std::vector<std::string>&, const std::vector<std::uint64_t>&,
                      std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t>(),
             "paths"_a, "capacities"_a, nb::kw_only(), "queue_depth"_a, "transfer_bytes_max"_a,
             "bounce_bytes"_a, "first_attempt_bytes"_a = 0)
        .def("submit", &PyEngine::submit, "op"_a, "device"_a.noconvert(),
             "offset_bytes"_a.noconvert(), "fragment_start"_a.noconvert(), "address"_a.noconvert(),
             "length_bytes"_a.noconvert(), "checksum"_a)
        .def("wait", &PyEngine::wait, "ticket"_a, "timeout_s"_a)
        .def("flush", &PyEngine::flush, "device"_a)
        .def("replace_file", &PyEngine::replace_file, "device"_a, "fd"_a)
        .def("register_memory", &PyEngine::register_memory, "address"_a, "length_bytes"_a)
        .def("unregister_memory", &PyEngine::unregister_memory, "region"_a)
        .def("stats", &PyEngine::stats)
        .def("grants", &PyEngine::grants)
        .def("close", &PyEngine::close);
    bind_nvme(m);
    bind_gio(m);
}
