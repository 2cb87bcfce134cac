// The handlers on the CPU: the same protocol by memcpy on a thread, to be tested without a GPU.

#ifndef SYNCOPATE_JAX_NATIVE_CPU_HANDLERS_H_
#define SYNCOPATE_JAX_NATIVE_CPU_HANDLERS_H_

#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "call_sites.h"
#include "meetings.h"
#include "seats.h"
#include "xla/ffi/api/ffi.h"

namespace {

void CopyInMemory(const Copy& c, const void* source, const Call& call) {
  const char* src = static_cast<const char*>(source) + c.src_offset;
  char* dst = call.buffers[c.result] + c.dst_offset;
  for (int64_t row = 0; row < c.rows; ++row) {
    std::memcpy(dst + row * c.dst_pitch, src + row * c.src_pitch, static_cast<size_t>(c.width));
  }
  if (c.slot >= 0) __atomic_store_n(call.flags + c.slot, c.value, __ATOMIC_RELEASE);
}

// XLA runs what is independent at once, on few threads. A handler that waits for its peers does so on
// a thread of its own, or theirs would find none.
void Complete(ffi::Promise& promise, ffi::Error error) {
  if (error.failure()) {
    promise.SetError(std::move(error));
  } else {
    promise.SetAvailable();
  }
}

ffi::Future Ended(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  Complete(promise, std::move(error));
  return future;
}

template <typename Body>
ffi::Future Beside(Body body) {
  ffi::Promise promise;
  ffi::Future future(promise);
  std::thread([promise = std::move(promise), held = std::optional<Body>(std::move(body))]() mutable {
    ffi::Error error = (*held)();
    held.reset();  // what it holds ends before the call does
    Complete(promise, std::move(error));
  }).detach();
  return future;
}

ffi::Future CpuStart(ffi::RunId run, int32_t ordinal, CpuState* state, ffi::RemainingArgs args,
                     ffi::RemainingRets rets, ffi::Dictionary) {
  auto timer = std::make_shared<Timer>(start_cost);
  std::shared_ptr<Site> site = state->site;
  ffi::ErrorOr<Call> decoded = Decode(site->name, args, rets);
  if (!decoded.has_value()) return Ended(decoded.error());
  Call& call = *decoded;
  Seat* seat = nullptr;
  if (ffi::Error error = FindSeat(*site, call, ordinal, nullptr, &seat); error.failure()) {
    return Ended(std::move(error));
  }
  const Key key = seat->Next(run.run_id, 0).key;
  if (call.flags != call.zeros) std::memcpy(call.flags, call.zeros, call.flag_bytes());
  std::vector<const void*> far;
  if (ffi::Error error = FarAddresses(*site, call, &far); error.failure()) {
    return Ended(std::move(error));
  }
  return Beside([=] {
    const int64_t rank = seat->rank;
    std::shared_ptr<Meeting> meeting;
    if (site->ranks > 1) {
      const Clock::time_point since = Clock::now();
      ffi::Error error =
          site->meetings.Meet(site->name, "start of the copies", key, rank, site->ranks,
                              site->limit, Card{call.sources, far, nullptr, {}}, &meeting);
      timer->Waited(since);
      if (error.failure()) return error;
    }
    if (!site->far.empty()) {
      const std::vector<int64_t> table = AddressTable(*site, meeting.get(), far);
      std::memcpy(call.buffers.back(), table.data(), table.size() * sizeof(int64_t));
    }
    std::shared_future<void> done = std::async(std::launch::async, [=] {
      for (const Copy& c : site->copies[rank]) {
        CopyInMemory(c,
                     c.src_rank == rank ? call.sources[c.operand]
                                        : meeting->cards[c.src_rank].sources[c.operand],
                     call);
      }
    });
    if (site->joined) {
      TheLedger().Add(ordinal, call.flags, Pending{site, seat, key, nullptr, done});
    } else {
      done.wait();
    }
    return ffi::Error::Success();
  });
}

struct Bytes {
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
};

// Results in the place of the operands from the first on; what is not there already is copied.
ffi::Error Results(ffi::RemainingArgs args, size_t first, ffi::RemainingRets rets,
                   std::vector<Bytes>* out) {
  for (size_t i = 0; i < rets.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> in = args.get<ffi::AnyBuffer>(first + i);
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> ret = rets.get<ffi::AnyBuffer>(i);
    if (!in.has_value()) return in.error();
    if (!ret.has_value()) return ret.error();
    if ((*ret)->untyped_data() != in->untyped_data()) {
      out->push_back({in->untyped_data(), (*ret)->untyped_data(), in->size_bytes()});
    }
  }
  return ffi::Error::Success();
}

ffi::Future CpuJoin(ffi::RunId run, int32_t ordinal, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  auto timer = std::make_shared<Timer>(join_cost);
  Pending pending;
  if (ffi::Error error = TakePending(args, ordinal, run.run_id, &pending); error.failure()) {
    return Ended(std::move(error));
  }
  std::vector<Bytes> results;
  ffi::Error unread = Results(args, 1, rets, &results);
  return Beside([=]() mutable {
    Site& site = *pending.site;
    pending.done.wait();  // whatever goes wrong: XLA frees the buffers then
    if (unread.failure()) return unread;
    if (site.ranks > 1) {
      std::get<3>(pending.key) = 1;
      std::shared_ptr<Meeting> meeting;
      const Clock::time_point since = Clock::now();
      ffi::Error error =
          site.meetings.Meet(site.name, "end of the copies", pending.key, pending.seat->rank,
                             site.ranks, site.limit, Card{{}, {}, nullptr, pending.done}, &meeting);
      for (const Card& card : meeting->cards) {
        if (card.done.valid()) card.done.wait();  // where the meeting failed, some did not come
      }
      timer->Waited(since);
      if (error.failure()) return error;
    }
    for (const Bytes& b : results) std::memcpy(b.to, b.from, b.count);
    return ffi::Error::Success();
  });
}

// wait(flags, wanted, buffers...) -> buffers
ffi::Future CpuWait(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view name,
                    int64_t limit_ms) {
  ffi::ErrorOr<ffi::AnyBuffer> flags = args.get<ffi::AnyBuffer>(0);
  ffi::ErrorOr<ffi::AnyBuffer> wanted = args.get<ffi::AnyBuffer>(1);
  if (!flags.has_value()) return Ended(flags.error());
  if (!wanted.has_value()) return Ended(wanted.error());
  std::vector<Bytes> results;
  if (ffi::Error error = Results(args, 2, rets, &results); error.failure()) {
    return Ended(std::move(error));
  }
  const auto* raised = static_cast<const int32_t*>(flags->untyped_data());
  const auto* least = static_cast<const int32_t*>(wanted->untyped_data());
  return Beside([=, slots = wanted->element_count(), name = std::string(name)] {
    const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
    for (size_t slot = 0; slot < slots; ++slot) {
      int32_t found = 0;
      while ((found = __atomic_load_n(raised + slot, __ATOMIC_ACQUIRE)) < least[slot]) {
        if (Clock::now() > deadline) {
          return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                            name + ": chunk " + std::to_string(slot) + " did not arrive within " +
                                std::to_string(limit_ms) + " ms: its flag is " +
                                std::to_string(found) + ", needs " + std::to_string(least[slot]));
        }
        std::this_thread::yield();
      }
    }
    for (const Bytes& b : results) std::memcpy(b.to, b.from, b.count);
    return ffi::Error::Success();
  });
}

}  // namespace

#endif  // SYNCOPATE_JAX_NATIVE_CPU_HANDLERS_H_
