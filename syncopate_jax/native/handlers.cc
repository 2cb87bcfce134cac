// XLA FFI handlers of the copy engine: chunks move beside a kernel, which waits for a flag a chunk.
//
//   start   takes zeroed flags, meets the handlers of the other devices of the process to exchange
//           addresses, and begins the copies into this device, each with a flag behind it; then the
//           kernel runs beside them
//   wait    CPU only, in the kernel's place: returns once the flags have the wanted counts
//   join    after the kernel: what the peers copy from this device stays alive until they are done
//
// All copies into a device are issued by its own handler (pulls), in the order of a table.
//
// A call site is one custom call of one executable. Its state, made when the executable is loaded,
// is shared by all devices of the process and holds the table, events and meetings.

#include <atomic>
#include <cstdint>
#include <string_view>

#include "call_sites.h"
#include "cpu_handlers.h"
#include "cuda_handlers.h"
#include "xla/ffi/api/ffi.h"

namespace {

auto SiteAttributes() {
  return ffi::Ffi::BindInstantiate()
      .Attr<std::string_view>("name")
      .Attr<int64_t>("ranks")
      .Attr<int64_t>("limit_ms")
      .Attr<bool>("joined")
      .Attr<ffi::Span<const int64_t>>("table")
      .Attr<ffi::Span<const int64_t>>("far");
}

}  // namespace

// No handler may be captured into a CUDA graph (none has the trait): a replay would not meet the
// other devices, whose addresses may change from call to call.

XLA_FFI_DEFINE_HANDLER_SYMBOL(SyncopateCudaSite, NewSite<kCuda>, SiteAttributes());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SyncopateCudaStart, CudaStart,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<CudaState>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SyncopateCudaJoin, CudaJoin,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SyncopateCpuSite, NewSite<kCpu>, SiteAttributes());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SyncopateCpuStart, CpuStart,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<CpuState>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SyncopateCpuJoin, CpuJoin,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SyncopateCpuWait, CpuWait,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("name")
                                  .Attr<int64_t>("limit_ms"));

extern "C" {
XLA_FFI_TypeId* SyncopateCudaTypeId() { return &CudaState::id; }
const XLA_FFI_TypeInfo* SyncopateCudaTypeInfo() { return &CudaState::info; }
XLA_FFI_TypeId* SyncopateCpuTypeId() { return &CpuState::id; }
const XLA_FFI_TypeInfo* SyncopateCpuTypeInfo() { return &CpuState::info; }

// Of start, then of join: calls, nanoseconds of host work, of waiting for peers, and the most work
// of one call; since the last reading.
void SyncopateTakeCost(int64_t* out) {
  for (Cost* cost : {&start_cost, &join_cost}) {
    for (std::atomic<int64_t>* value : {&cost->calls, &cost->work, &cost->wait, &cost->most}) {
      *out++ = value->exchange(0);
    }
  }
}
}
