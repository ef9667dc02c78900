// The CUDA driver by dlopen: which memory an address is, and copies on a stream.
#include "tutti/device_copy.h"

#include <dlfcn.h>

#include <vector>

namespace tutti {
namespace {

// Of the driver's API (cuda.h).
constexpr int kSuccess = 0;
constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr int kAttributeMemoryType = 2;     // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kAttributeIsManaged = 8;      // CU_POINTER_ATTRIBUTE_IS_MANAGED
constexpr unsigned kMemoryTypeDevice = 2;   // CU_MEMORYTYPE_DEVICE
constexpr unsigned kRegisterPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE

}  // namespace

struct DeviceCopy::Driver {
    using Address = unsigned long long;
    int (*init)(unsigned);
    int (*device_get)(int*, int);
    int (*retain)(void**, int);
    int (*release)(int);
    int (*set_current)(void*);
    int (*stream_create)(void**, unsigned);
    int (*stream_destroy)(void*);
    int (*stream_synchronize)(void*);
    int (*attribute)(void*, int, Address);
    int (*host_register)(void*, std::size_t, unsigned);
    int (*host_unregister)(void*);
    int (*memcpy_async)(Address, Address, std::size_t, void*);

    void* library = nullptr;
    int device = -1;
    void* context = nullptr;
    void* stream = nullptr;
    std::vector<void*> pinned;

    template <class Function>
    bool find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }

    bool find_all() {
        return find(init, "cuInit") && find(device_get, "cuDeviceGet") &&
               find(retain, "cuDevicePrimaryCtxRetain") &&
               find(release, "cuDevicePrimaryCtxRelease_v2") &&
               find(set_current, "cuCtxSetCurrent") && find(stream_create, "cuStreamCreate") &&
               find(stream_destroy, "cuStreamDestroy_v2") &&
               find(stream_synchronize, "cuStreamSynchronize") &&
               find(attribute, "cuPointerGetAttribute") &&
               find(host_register, "cuMemHostRegister_v2") &&
               find(host_unregister, "cuMemHostUnregister") && find(memcpy_async, "cuMemcpyAsync");
    }

    bool start() {
        return init(0) == kSuccess && device_get(&device, 0) == kSuccess &&
               retain(&context, device) == kSuccess && set_current(context) == kSuccess &&
               stream_create(&stream, kStreamNonBlocking) == kSuccess;
    }

    ~Driver() {
        if (context != nullptr && set_current(context) == kSuccess) {
            if (stream != nullptr) {
                (void)stream_synchronize(stream);
                (void)stream_destroy(stream);
            }
            for (void* address : pinned) (void)host_unregister(address);
        }
        if (context != nullptr) (void)release(device);
        // The library stays: the driver does not like to be unloaded.
    }
};

DeviceCopy::DeviceCopy() : driver_(std::make_unique<Driver>()) {}
DeviceCopy::~DeviceCopy() = default;

std::unique_ptr<DeviceCopy> DeviceCopy::open(const std::string& library, std::string& what) {
    std::unique_ptr<DeviceCopy> copy(new DeviceCopy);
    Driver& driver = *copy->driver_;
    driver.library = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (driver.library == nullptr) {
        what = "there is no CUDA driver: " + std::string(dlerror());
        return nullptr;
    }
    if (!driver.find_all()) {
        what = library + " lacks a function of the CUDA driver";
        return nullptr;
    }
    if (!driver.start()) {
        what = "the CUDA driver gives no GPU, no context or no stream";
        return nullptr;
    }
    return copy;
}

bool DeviceCopy::is_device(const void* address) const {
    const auto at = Driver::Address(reinterpret_cast<std::uintptr_t>(address));
    unsigned type = 0, managed = 0;
    // Memory that CUDA does not know is an error to it, and host memory to us.
    if (driver_->attribute(&type, kAttributeMemoryType, at) != kSuccess) return false;
    (void)driver_->attribute(&managed, kAttributeIsManaged, at);
    return type == kMemoryTypeDevice && managed == 0;
}

void DeviceCopy::pin(void* address, std::size_t length_bytes) {
    if (driver_->set_current(driver_->context) == kSuccess &&
        driver_->host_register(address, length_bytes, kRegisterPortable) == kSuccess)
        driver_->pinned.push_back(address);
}

bool DeviceCopy::copy(void* to, const void* from, std::size_t length_bytes) {
    const auto address = [](const void* at) {
        return Driver::Address(reinterpret_cast<std::uintptr_t>(at));
    };
    return driver_->set_current(driver_->context) == kSuccess &&
           driver_->memcpy_async(address(to), address(from), length_bytes, driver_->stream) ==
               kSuccess;
}

bool DeviceCopy::finish() {
    return driver_->set_current(driver_->context) == kSuccess &&
           driver_->stream_synchronize(driver_->stream) == kSuccess;
}

}  // namespace tutti
