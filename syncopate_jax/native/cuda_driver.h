// The CUDA driver, opened at run time: no CUDA header and no nvcc is needed to compile this.

#ifndef SYNCOPATE_JAX_NATIVE_CUDA_DRIVER_H_
#define SYNCOPATE_JAX_NATIVE_CUDA_DRIVER_H_

#include <dlfcn.h>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

using CUresult = int;
using CUstream = void*;
using CUevent = void*;
using CUdeviceptr = unsigned long long;

constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;
constexpr unsigned kMemoryTypeHost = 1, kMemoryTypeUnified = 4;
constexpr int kAttributeMemoryType = 2;

// The driver's CUDA_MEMCPY2D (version 2).
struct Memcpy2D {
  size_t src_x = 0, src_y = 0;
  unsigned src_type = kMemoryTypeUnified;
  const void* src_host = nullptr;
  CUdeviceptr src = 0;
  void* src_array = nullptr;
  size_t src_pitch = 0;
  size_t dst_x = 0, dst_y = 0;
  unsigned dst_type = kMemoryTypeUnified;
  void* dst_host = nullptr;
  CUdeviceptr dst = 0;
  void* dst_array = nullptr;
  size_t dst_pitch = 0;
  size_t width = 0, height = 0;
};

struct Driver {
  CUresult (*GetErrorName)(CUresult, const char**);
  CUresult (*StreamCreate)(CUstream*, unsigned);
  CUresult (*StreamSynchronize)(CUstream);
  CUresult (*StreamWaitEvent)(CUstream, CUevent, unsigned);
  CUresult (*StreamWriteValue32)(CUstream, CUdeviceptr, uint32_t, unsigned);
  CUresult (*EventCreate)(CUevent*, unsigned);
  CUresult (*EventRecord)(CUevent, CUstream);
  CUresult (*MemcpyAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*Memcpy2DAsync)(const Memcpy2D*, CUstream);
  CUresult (*PointerGetAttribute)(void*, int, CUdeviceptr);
  std::string missing;  // why the driver cannot be used; empty when it can

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      const char* why = dlerror();
      missing = std::string("the CUDA driver could not be opened (") +
                (why ? why : "libcuda.so.1") + "); install the NVIDIA driver";
      return;
    }
    Find(library, "cuGetErrorName", GetErrorName);
    Find(library, "cuStreamCreate", StreamCreate);
    Find(library, "cuStreamSynchronize", StreamSynchronize);
    Find(library, "cuStreamWaitEvent", StreamWaitEvent);
    Find(library, "cuStreamWriteValue32_v2", StreamWriteValue32);
    Find(library, "cuEventCreate", EventCreate);
    Find(library, "cuEventRecord", EventRecord);
    Find(library, "cuMemcpyAsync", MemcpyAsync);
    Find(library, "cuMemcpy2DAsync_v2", Memcpy2DAsync);
    Find(library, "cuPointerGetAttribute", PointerGetAttribute);
  }

  template <typename F>
  void Find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr && missing.empty()) {
      missing = std::string("the CUDA driver lacks ") + name + "; it needs to be of CUDA 12 or newer";
    }
  }

  ffi::Error Failed(const std::string& site, const char* what, CUresult code) const {
    const char* name = nullptr;
    GetErrorName(code, &name);
    return ffi::Error::Internal(site + ": " + what + " failed: " + (name ? name : "unknown") +
                                " (" + std::to_string(code) + ")");
  }
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

#define RETURN_IF_FAILED(site, call)                                               \
  if (CUresult code = cuda.call; code != 0) return cuda.Failed(site, #call, code)

CUdeviceptr Address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Streams and events outlive the executables that used them, and are used again.
class Pool {
 public:
  static Pool& Of(int ordinal) {
    static std::mutex mutex;
    static std::map<int, Pool> pools;
    std::lock_guard<std::mutex> lock(mutex);
    return pools[ordinal];
  }

  CUresult Stream(size_t lane, CUstream* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (streams_.size() <= lane) {
      CUstream stream = nullptr;
      if (CUresult code = TheDriver().StreamCreate(&stream, kStreamNonBlocking)) return code;
      streams_.push_back(stream);
    }
    *out = streams_[lane];
    return 0;
  }

  CUresult Take(CUevent* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (events_.empty()) return TheDriver().EventCreate(out, kEventDisableTiming);
    *out = events_.back();
    events_.pop_back();
    return 0;
  }

  void Return(CUevent event) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<CUstream> streams_;
  std::vector<CUevent> events_;
};

}  // namespace

#endif  // SYNCOPATE_JAX_NATIVE_CUDA_DRIVER_H_
