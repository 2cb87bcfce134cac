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

// After an error XLA frees the buffers, and knows nothing of the side streams: what they have begun
// is awaited first. They wait for no more than what was ahead of this call on its own stream and on
// those of its peers. The first error is the one to tell.
ffi::Error Drained(const Seat& seat, ffi::Error error) {
  for (CUstream side : seat.sides) TheDriver().StreamSynchronize(side);
  return error;
}

ffi::Error BeginCopies(const Site& site, const Seat& seat, const Turn& turn, const Call& call,
                       const Meeting* meeting, CUstream stream) {
  const Driver& cuda = TheDriver();
  for (CUstream side : seat.sides) {
    RETURN_IF_FAILED(site.name, StreamWaitEvent(side, seat.ready[turn.place], 0));
  }
  std::vector<char> awaited(site.ranks * site.sides);
  for (const Copy& c : site.copies[seat.rank]) {
    const bool own = c.src_rank == seat.rank;
    const void* source =
        own ? call.sources[c.operand] : meeting->cards[c.src_rank].sources[c.operand];
    // Copies within the device stand before the kernel on its own stream (see CheckBeside).
    const CUstream lane = c.lane == 0 ? stream : seat.sides[c.lane - 1];
    if (!own && c.lane > 0 && !awaited[c.src_rank * site.sides + c.lane - 1]) {
      RETURN_IF_FAILED(site.name, StreamWaitEvent(lane, meeting->cards[c.src_rank].event, 0));
      awaited[c.src_rank * site.sides + c.lane - 1] = 1;
    }
    ffi::Error error = CopyOnStream(site, c, source, call, lane);
    if (error.failure()) return error;
  }
  if (!site.joined) return ffi::Error::Success();
  // The first side stream, or without one the kernel's own, is done when all of them are.
  const CUstream last = seat.sides.empty() ? stream : seat.sides.front();
  for (size_t lane = 1; lane < seat.sides.size(); ++lane) {
    const CUevent passed = seat.passed[turn.place * (site.sides - 1) + lane - 1];
    RETURN_IF_FAILED(site.name, EventRecord(passed, seat.sides[lane]));
    RETURN_IF_FAILED(site.name, StreamWaitEvent(last, passed, 0));
  }
  RETURN_IF_FAILED(site.name, EventRecord(seat.done[turn.place], last));
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
  const Turn turn = seat->Next(run.run_id, 0);
  if (call.flags != call.zeros) {
    RETURN_IF_FAILED(site.name, MemcpyAsync(Address(call.flags), Address(call.zeros),
                                            call.flag_bytes(), stream));
  }
  RETURN_IF_FAILED(site.name, EventRecord(seat->ready[turn.place], stream));

  std::vector<const void*> far;
  if (ffi::Error error = FarAddresses(site, call, &far); error.failure()) return error;
  std::shared_ptr<Meeting> meeting;
  if (site.ranks > 1) {
    Card card{call.sources, far, seat->ready[turn.place], {}};
    const Clock::time_point since = Clock::now();
    ffi::Error error = site.meetings.Meet(site.name, "start of the copies", turn.key, seat->rank,
                                          site.ranks, site.limit, std::move(card), &meeting);
    timer.Waited(since);
    if (error.failure()) return error;
  }
  if (!site.far.empty()) {
    // Before a kernel touches what is far, it exists and its counters are zero.
    for (size_t peer = 0; meeting && peer < site.ranks; ++peer) {
      RETURN_IF_FAILED(site.name, StreamWaitEvent(stream, meeting->cards[peer].event, 0));
    }
    seat->addresses[turn.place] = AddressTable(site, meeting.get(), far);
    const std::vector<int64_t>& table = seat->addresses[turn.place];
    RETURN_IF_FAILED(site.name, MemcpyAsync(Address(call.buffers.back()), Address(table.data()),
                                            table.size() * sizeof(int64_t), stream));
  }
  if (ffi::Error error = BeginCopies(site, *seat, turn, call, meeting.get(), stream);
      error.failure()) {
    return Drained(*seat, std::move(error));
  }
  if (site.joined) {
    const CUevent done = seat->done[turn.place];
    TheLedger().Add(ordinal, call.flags, Pending{state->site, seat, turn.key, done, {}});
  }
  return ffi::Error::Success();
}

// Behind the copies of this rank, and what peers do with its memory.
ffi::Error EndTogether(Pending& pending, CUstream stream, Timer& timer) {
  const Driver& cuda = TheDriver();
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
  for (const Card& card : meeting->cards) {
    // Its own has been waited for; where the meeting failed, some did not come.
    if (card.event == pending.event || card.event == nullptr) continue;
    RETURN_IF_FAILED(site.name, StreamWaitEvent(stream, card.event, 0));
  }
  return error;
}

// join(flags, results..., kept...) -> results
ffi::Error CudaJoin(void* stream, ffi::RunId run, int32_t ordinal, ffi::RemainingArgs args,
                    ffi::RemainingRets) {
  Timer timer(join_cost);
  Pending pending;
  if (ffi::Error error = TakePending(args, ordinal, run.run_id, &pending); error.failure()) {
    return error;
  }
  ffi::Error error = EndTogether(pending, stream, timer);
  return error.failure() ? Drained(*pending.seat, std::move(error)) : error;
}

}  // namespace

#endif  // SYNCOPATE_JAX_NATIVE_CUDA_HANDLERS_H_
