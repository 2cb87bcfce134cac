// The handlers on CUDA: copies on side streams, flags written by the stream behind each.

#ifndef SYNCOPATE_JAX_NATIVE_CUDA_HANDLERS_H_
#define SYNCOPATE_JAX_NATIVE_CUDA_HANDLERS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "call_sites.h"
#include "cuda_driver.h"
#include "meetings.h"
#include "seats.h"
#include "xla/ffi/api/ffi.h"

namespace {

ffi::Error CopyOnStream(const Site& site, const Copy& c, const void* source, const Call& call,
                        CUstream stream) {
  const Driver& cuda = TheDriver();
  const CUdeviceptr src = Address(source) + c.src_offset;
  const CUdeviceptr dst = Address(call.buffers[c.result]) + c.dst_offset;
  if (c.rows == 1) {
    RETURN_IF_FAILED(site.name, MemcpyAsync(dst, src, c.width, stream));
  } else {
    Memcpy2D box;
    box.src = src;
    box.src_pitch = c.src_pitch;
    box.dst = dst;
    box.dst_pitch = c.dst_pitch;
    box.width = c.width;
    box.height = c.rows;
    RETURN_IF_FAILED(site.name, Memcpy2DAsync(&box, stream));
  }
  // Written by the stream that copies: a stream write comes behind all that its stream did before,
  // and a fence of system scope (none with CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER). Behind an event
  // on a stream without copies, the flag was seen to come only when the kernel that waits for it had
  // nothing else left to do.
  if (c.slot >= 0) {
    RETURN_IF_FAILED(site.name, StreamWriteValue32(stream, Address(call.flags + c.slot),
                                                   static_cast<uint32_t>(c.value), 0));
  }
  return ffi::Error::Success();
}

ffi::Error CudaStart(void* stream, ffi::RunId run, int32_t ordinal, CudaState* state,
                     ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  Timer timer(start_cost);
  Site& site = *state->site;
  const Driver& cuda = TheDriver();
  if (!cuda.missing.empty()) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, site.name + ": " + cuda.missing);
  }
  ffi::ErrorOr<Call> decoded = Decode(site.name, args, rets);
  if (!decoded.has_value()) return decoded.error();
  Call& call = *decoded;
  Seat* seat = nullptr;
  if (ffi::Error error = FindSeat(site, call, ordinal, stream, &seat); error.failure()) {
    return error;
  }
  const Key key = seat->Next(run.run_id, 0);
  const CUevent ready = seat->ready[seat->next], done = seat->done[seat->next];
  if (call.flags != call.zeros) {
    RETURN_IF_FAILED(site.name, MemcpyAsync(Address(call.flags), Address(call.zeros),
                                            call.flag_bytes(), stream));
  }
  RETURN_IF_FAILED(site.name, EventRecord(ready, stream));

  std::vector<const void*> far;
  if (ffi::Error error = FarAddresses(site, call, &far); error.failure()) return error;
  std::shared_ptr<Meeting> meeting;
  if (site.ranks > 1) {
    Card card{call.sources, far, ready, {}};
    const Clock::time_point since = Clock::now();
    ffi::Error error = site.meetings.Meet(site.name, "start of the copies", key, seat->rank,
                                          site.ranks, site.limit, std::move(card), &meeting);
    timer.Waited(since);
    if (error.failure()) return error;
  }
  if (!site.far.empty()) {
    // Before a kernel touches what is far, it exists and its counters are zero.
    for (size_t peer = 0; meeting && peer < site.ranks; ++peer) {
      RETURN_IF_FAILED(site.name, StreamWaitEvent(stream, meeting->cards[peer].event, 0));
    }
    seat->addresses[seat->next] = AddressTable(site, meeting.get(), far);
    const std::vector<int64_t>& table = seat->addresses[seat->next];
    RETURN_IF_FAILED(site.name, MemcpyAsync(Address(call.buffers.back()), Address(table.data()),
                                            table.size() * sizeof(int64_t), stream));
  }
  for (CUstream side : seat->sides) {
    RETURN_IF_FAILED(site.name, StreamWaitEvent(side, ready, 0));
  }
  std::vector<char> awaited(site.ranks * site.sides);
  for (const Copy& c : site.copies[seat->rank]) {
    const bool own = c.src_rank == seat->rank;
    const void* source =
        own ? call.sources[c.operand] : meeting->cards[c.src_rank].sources[c.operand];
    // Copies within the device stand before the kernel on its own stream (see CheckBeside).
    const CUstream lane = c.lane == 0 ? stream : seat->sides[c.lane - 1];
    if (!own && c.lane > 0 && !awaited[c.src_rank * site.sides + c.lane - 1]) {
      RETURN_IF_FAILED(site.name, StreamWaitEvent(lane, meeting->cards[c.src_rank].event, 0));
      awaited[c.src_rank * site.sides + c.lane - 1] = 1;
    }
    ffi::Error error = CopyOnStream(site, c, source, call, lane);
    if (error.failure()) return error;
  }
  if (!site.joined) return ffi::Error::Success();
  // The first side stream, or without one the kernel's own, is done when all of them are.
  const CUstream last = seat->sides.empty() ? stream : seat->sides.front();
  for (size_t lane = 1; lane < seat->sides.size(); ++lane) {
    const CUevent passed = seat->passed[seat->next * (site.sides - 1) + lane - 1];
    RETURN_IF_FAILED(site.name, EventRecord(passed, seat->sides[lane]));
    RETURN_IF_FAILED(site.name, StreamWaitEvent(last, passed, 0));
  }
  RETURN_IF_FAILED(site.name, EventRecord(done, last));
  TheLedger().Add(ordinal, call.flags, Pending{state->site, seat, key, done, {}});
  return ffi::Error::Success();
}

// join(flags, results..., kept...) -> results
ffi::Error CudaJoin(void* stream, ffi::RunId run, int32_t ordinal, ffi::RemainingArgs args,
                    ffi::RemainingRets) {
  Timer timer(join_cost);
  const Driver& cuda = TheDriver();
  Pending pending;
  if (ffi::Error error = TakePending(args, ordinal, run.run_id, &pending); error.failure()) {
    return error;
  }
  Site& site = *pending.site;
  RETURN_IF_FAILED(site.name, StreamWaitEvent(stream, pending.event, 0));
  if (site.ranks == 1) return ffi::Error::Success();
  // Where peers' kernels touch this device, what ends is the kernel, not the copies.
  if (!site.far.empty()) RETURN_IF_FAILED(site.name, EventRecord(pending.event, stream));
  std::get<3>(pending.key) = 1;
  std::shared_ptr<Meeting> meeting;
  const Clock::time_point since = Clock::now();
  ffi::Error error =
      site.meetings.Meet(site.name, "end of the copies", pending.key, pending.seat->rank,
                         site.ranks, site.limit, Card{{}, {}, pending.event, {}}, &meeting);
  timer.Waited(since);
  if (error.failure()) return error;
  for (const Card& card : meeting->cards) {
    if (card.event == pending.event) continue;  // has been waited for
    RETURN_IF_FAILED(site.name, StreamWaitEvent(stream, card.event, 0));
  }
  return ffi::Error::Success();
}

}  // namespace

#endif  // SYNCOPATE_JAX_NATIVE_CUDA_HANDLERS_H_
