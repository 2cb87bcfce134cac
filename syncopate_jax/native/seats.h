// Seats: a device at a call site, made at its first call.

#ifndef SYNCOPATE_JAX_NATIVE_SEATS_H_
#define SYNCOPATE_JAX_NATIVE_SEATS_H_

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "call_sites.h"
#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace {

// A copy within a device may be run as a kernel, and would never start beside a kernel that fills
// the device and waits for it: only host memory may be copied beside the kernel without a peer.
ffi::Error CheckBeside(const Site& site, const Call& call, int64_t rank) {
  const Driver& cuda = TheDriver();
  for (const Copy& c : site.copies[rank]) {
    if (c.lane == 0 || c.src_rank != rank) continue;
    unsigned type = 0;  // stays 0 for memory that the driver does not know
    const CUdeviceptr source = Address(call.sources[c.operand]);
    if (cuda.PointerGetAttribute(&type, kAttributeMemoryType, source) != 0 ||
        type != kMemoryTypeHost) {
      return ffi::Error::InvalidArgument(
          site.name + ": operand " + std::to_string(c.operand) +
          " is copied beside the kernel but is not in pinned host memory (the driver says kind " +
          std::to_string(type) + ", needs 1); put it there with memory_kind='pinned_host'");
    }
  }
  return ffi::Error::Success();
}

ffi::Error NewSeat(const Site& site, const Call& call, CUstream stream, Seat* seat) {
  const Driver& cuda = TheDriver();
  if (site.ranks > 1) {
    // Once a device and executable: which rank it is. Waits for the stream.
    int32_t place[kPlace] = {};
    RETURN_IF_FAILED(site.name,
                     MemcpyAsync(Address(place), Address(call.place()), sizeof(place), stream));
    RETURN_IF_FAILED(site.name, StreamSynchronize(stream));
    seat->group = place[0];
    seat->rank = place[1];
  }
  Pool& pool = Pool::Of(seat->ordinal);
  seat->sides.resize(site.sides);
  for (size_t lane = 0; lane < site.sides; ++lane) {
    if (CUresult code = pool.Stream(lane, &seat->sides[lane])) {
      return cuda.Failed(site.name, "StreamCreate", code);
    }
  }
  const size_t others = site.sides > 0 ? site.sides - 1 : 0;
  for (auto [events, count] : {std::pair(&seat->ready, kRing), std::pair(&seat->done, kRing),
                               std::pair(&seat->passed, kRing * others)}) {
    while (events->size() < count) {
      CUevent event = nullptr;
      if (CUresult code = pool.Take(&event)) return cuda.Failed(site.name, "EventCreate", code);
      events->push_back(event);
    }
  }
  return ffi::Error::Success();
}

// The device's only seat: of threads that make it at once, one is heard, and all get its seat.
ffi::Error FindSeat(Site& site, const Call& call, int ordinal, CUstream stream, Seat** out) {
  {
    std::lock_guard<std::mutex> lock(site.mutex);
    auto found = site.seats.find(ordinal);
    if (found != site.seats.end()) {
      *out = found->second.get();
      return ffi::Error::Success();
    }
  }
  auto seat = std::make_unique<Seat>();
  seat->ordinal = ordinal;
  if (stream != nullptr) {
    if (ffi::Error error = NewSeat(site, call, stream, seat.get()); error.failure()) return error;
  } else if (site.ranks > 1) {
    seat->group = call.place()[0];
    seat->rank = call.place()[1];
  }
  if (seat->rank < 0 || seat->rank >= static_cast<int64_t>(site.ranks)) {
    return ffi::Error::InvalidArgument(site.name + ": device " + std::to_string(ordinal) +
                                       " is rank " + std::to_string(seat->rank) + " of " +
                                       std::to_string(site.ranks));
  }
  if (ffi::Error error = Check(site, call, seat->rank); error.failure()) return error;
  if (stream != nullptr) {
    if (ffi::Error error = CheckBeside(site, call, seat->rank); error.failure()) return error;
  }
  std::lock_guard<std::mutex> lock(site.mutex);
  *out = site.seats.try_emplace(ordinal, std::move(seat)).first->second.get();
  return ffi::Error::Success();
}

}  // namespace

#endif  // SYNCOPATE_JAX_NATIVE_SEATS_H_
