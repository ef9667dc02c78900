// What the parts of the Python binding share: array types, and errors as OSError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace tutti {

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

/// Hand a vector over to numpy without copying it.
template <typename T>
Out<T> to_numpy(std::vector<T> values) {
    auto owner = std::make_unique<std::vector<T>>(std::move(values));
    nb::capsule guard(owner.get(),
                      [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    std::vector<T>* kept = owner.release();
    return Out<T>(kept->data(), {kept->size()}, guard);
}

template <typename T>
std::span<const T> view(const In<T>& array) {
    return {array.data(), array.shape(0)};
}

/// OSError(errno, what). `status` is a negative errno.
[[noreturn]] inline void raise_os_error(int status, const std::string& what) {
    nb::object args = nb::make_tuple(-status, what);
    PyErr_SetObject(PyExc_OSError, args.ptr());
    throw nb::python_error();
}

void bind_nvme(nb::module_& m);
void bind_gio(nb::module_& m);

}  // namespace tutti
