// Call sites of the copy engine: their copies, the devices at each, and what a call is handed.

#ifndef SYNCOPATE_JAX_NATIVE_CALL_SITES_H_
#define SYNCOPATE_JAX_NATIVE_CALL_SITES_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "meetings.h"
#include "xla/ffi/api/ffi.h"

namespace {

// What the handlers cost the host.
struct Cost {
  std::atomic<int64_t> calls{0}, work{0}, wait{0}, most{0};

  void Add(int64_t worked, int64_t waited) {
    calls += 1;
    work += worked;
    wait += waited;
    int64_t seen = most;
    while (seen < worked && !most.compare_exchange_weak(seen, worked)) {
    }
  }
};
Cost start_cost, join_cost;

int64_t Nanoseconds(Clock::duration d) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(d).count();
}

class Timer {
 public:
  explicit Timer(Cost& cost) : cost_(cost) {}
  ~Timer() { cost_.Add(Nanoseconds(Clock::now() - begin_) - waited_, waited_); }
  void Waited(Clock::time_point since) { waited_ += Nanoseconds(Clock::now() - since); }

 private:
  Cost& cost_;
  Clock::time_point begin_ = Clock::now();
  int64_t waited_ = 0;
};

// `rows` rows of `width` bytes into this rank; then, where slot >= 0, value goes to the flag.
struct Copy {
  int64_t dst_rank, src_rank, operand, src_offset, src_pitch;
  int64_t result, dst_offset, dst_pitch, width, rows, slot, value;
  int64_t lane;  // 0: the kernel's own stream, ahead of it; from 1: a side stream, beside it
};
constexpr size_t kCopyFields = 13;
constexpr int64_t kMostLanes = 8;
static_assert(sizeof(Copy) == kCopyFields * sizeof(int64_t));

constexpr size_t kRing = 4;  // join keeps ranks within one call of each other; two would do
constexpr size_t kRuns = 64;  // that overlap on a device; XLA has 32 in flight at most

// A call's key, and its place in the rings of its seat.
struct Turn {
  Key key;
  size_t place;
};

// One device at one call site; of a seat, only turns change once it is found.
struct Seat {
  int ordinal = 0;
  int64_t rank = 0, group = 0;
  std::vector<CUstream> sides;   // of lane 1, 2, ...
  std::vector<CUevent> ready, done, passed;  // a ring each; passed: one a side stream but the first
  std::vector<int64_t> addresses[kRing];  // kept until they have been copied
  std::mutex mutex;                           // of what follows
  std::deque<std::pair<int64_t, int64_t>> calls;  // of the last runs: the run, its calls so far
  size_t next = 0;

  ~Seat() {
    for (const std::vector<CUevent>* events : {&ready, &done, &passed}) {
      for (CUevent event : *events) Pool::Of(ordinal).Return(event);
    }
  }

  // The calls of a run are counted, since a loop runs one call site several times; runs may overlap.
  Turn Next(int64_t run, int phase) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = std::find_if(calls.begin(), calls.end(),
                              [=](const auto& one) { return one.first == run; });
    if (found == calls.end()) {
      if (calls.size() == kRuns) calls.pop_front();
      found = calls.emplace(calls.end(), run, 0);
    }
    next = (next + 1) % kRing;
    return {{run, found->second++, group, phase}, next};
  }
};

struct Site {
  std::string name;
  size_t ranks = 0;
  bool joined = true;  // whether a join follows each start
  std::chrono::milliseconds limit{0};
  std::vector<std::vector<Copy>> copies;  // by destination rank
  size_t sides = 0;                       // side streams in use
  std::vector<int64_t> far;               // operand i, or result i as -1 - i (the flags last)
  Meetings meetings;
  std::mutex mutex;
  std::map<int, std::unique_ptr<Seat>> seats;
};

// A start whose join has not run yet.
struct Pending {
  std::shared_ptr<Site> site;
  Seat* seat;
  Key key;
  CUevent event;
  std::shared_future<void> done;
};

// Starts by device and address of their flags, which a join is handed too: unique while both run.
class Ledger {
 public:
  void Add(int ordinal, const void* flags, Pending pending) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Where a run ended in an error, a start without a join is overwritten here.
    pending_[{ordinal, flags}] = std::move(pending);
  }

  ffi::Error Take(int ordinal, const void* flags, int64_t run, Pending* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = pending_.find({ordinal, flags});
    if (found == pending_.end() || std::get<0>(found->second.key) != run) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        "copy engine: a join on device " + std::to_string(ordinal) +
                            " has no start of the same run; give it the flags that start "
                            "returned, or, where a call failed before, mend that one first");
    }
    *out = std::move(found->second);
    pending_.erase(found);
    return ffi::Error::Success();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, Pending> pending_;
};

Ledger& TheLedger() {
  static Ledger ledger;
  return ledger;
}

// XLA keeps one registry of types a platform, so each platform has a type of its own.
template <int platform>
struct SiteState {
  static ffi::TypeId id;
  static const ffi::TypeInfo info;
  std::shared_ptr<Site> site;
};
template <int platform>
ffi::TypeId SiteState<platform>::id = {};
template <int platform>
const ffi::TypeInfo SiteState<platform>::info = ffi::MakeTypeInfo<SiteState<platform>>();

constexpr int kCpu = 0, kCuda = 1;
using CpuState = SiteState<kCpu>;
using CudaState = SiteState<kCuda>;

template <int platform>
ffi::ErrorOr<std::unique_ptr<SiteState<platform>>> NewSite(std::string_view name,
                                                           int64_t ranks, int64_t limit_ms,
                                                           bool joined,
                                                           ffi::Span<const int64_t> table,
                                                           ffi::Span<const int64_t> far) {
  auto site = std::make_shared<Site>();
  site->name = std::string(name);
  site->ranks = static_cast<size_t>(ranks);
  site->joined = joined;
  site->limit = std::chrono::milliseconds(limit_ms);
  site->copies.resize(site->ranks);
  site->far.assign(far.begin(), far.end());
  if (table.size() % kCopyFields != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        site->name + ": the table of copies has " + std::to_string(table.size()) +
        " numbers, needs " + std::to_string(kCopyFields) + " a copy"));
  }
  std::map<std::pair<int64_t, int64_t>, int64_t> lanes;  // by destination rank and flag
  for (size_t at = 0; at < table.size(); at += kCopyFields) {
    Copy copy;
    std::memcpy(&copy, table.begin() + at, sizeof(copy));
    if (copy.dst_rank < 0 || copy.dst_rank >= ranks || copy.src_rank < 0 || copy.src_rank >= ranks) {
      return ffi::Unexpected(ffi::Error::InvalidArgument(
          site->name + ": copy " + std::to_string(at / kCopyFields) + " goes from rank " +
          std::to_string(copy.src_rank) + " to rank " + std::to_string(copy.dst_rank) +
          "; there are " + std::to_string(ranks)));
    }
    const int64_t least = copy.src_rank == copy.dst_rank ? 0 : 1;
    if (copy.lane < least || copy.lane > kMostLanes) {
      return ffi::Unexpected(ffi::Error::InvalidArgument(
          site->name + ": copy " + std::to_string(at / kCopyFields) + " is on lane " +
          std::to_string(copy.lane) + "; there are 1 to " + std::to_string(kMostLanes) + ", and 0 for copies within a rank"));
    }
    if (copy.slot >= 0) {
      // Streams keep no order among each other: a flag that two raise could fall.
      const int64_t first = lanes.try_emplace({copy.dst_rank, copy.slot}, copy.lane).first->second;
      if (first != copy.lane) {
        return ffi::Unexpected(ffi::Error::InvalidArgument(
            site->name + ": copy " + std::to_string(at / kCopyFields) + " raises flag " +
            std::to_string(copy.slot) + " of rank " + std::to_string(copy.dst_rank) +
            " on lane " + std::to_string(copy.lane) + ", and one before it on lane " +
            std::to_string(first) + "; give all copies of a flag one lane"));
      }
    }
    site->copies[copy.dst_rank].push_back(copy);
    site->sides = std::max(site->sides, static_cast<size_t>(copy.lane));
  }
  auto state = std::make_unique<SiteState<platform>>();
  state->site = std::move(site);
  return state;
}

// Operands and results.

// start(flags, sources...) -> (buffers..., flags): flags are int32, zeros, and behind them the group
// and rank of this device; they come back in place, or where XLA keeps them, as a copy.
constexpr size_t kPlace = 2;

struct Call {
  const int32_t* zeros = nullptr;
  std::vector<const void*> sources;
  std::vector<size_t> source_bytes;
  std::vector<char*> buffers;
  std::vector<size_t> buffer_bytes;
  int32_t* flags = nullptr;
  size_t slots = 0;

  const int32_t* place() const { return zeros + slots; }
  size_t flag_bytes() const { return (slots + kPlace) * sizeof(int32_t); }
};

ffi::ErrorOr<Call> Decode(const std::string& site, ffi::RemainingArgs args,
                          ffi::RemainingRets rets) {
  Call call;
  size_t given = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> arg = args.get<ffi::AnyBuffer>(i);
    if (!arg.has_value()) return ffi::Unexpected(arg.error());
    if (i == 0) {
      call.zeros = static_cast<const int32_t*>(arg->untyped_data());
      given = arg->element_count();
    } else {
      call.sources.push_back(arg->untyped_data());
      call.source_bytes.push_back(arg->size_bytes());
    }
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> ret = rets.get<ffi::AnyBuffer>(i);
    if (!ret.has_value()) return ffi::Unexpected(ret.error());
    if (i + 1 == rets.size()) {
      call.flags = static_cast<int32_t*>((*ret)->untyped_data());
      if (given < kPlace || (*ret)->element_count() != given) {
        return ffi::Unexpected(ffi::Error::InvalidArgument(
            site + ": start takes flags and a place, and returns as many numbers; found " +
            std::to_string(given) + " and " + std::to_string((*ret)->element_count())));
      }
      call.slots = given - kPlace;
    } else {
      call.buffers.push_back(static_cast<char*>((*ret)->untyped_data()));
      call.buffer_bytes.push_back((*ret)->size_bytes());
    }
  }
  if (call.zeros == nullptr || call.flags == nullptr) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        site + ": start takes flags and sources, and returns buffers and flags"));
  }
  return call;
}

// All ranks have sources and buffers of one size, so a rank can check what it copies from a peer.
ffi::Error Check(const Site& site, const Call& call, int64_t rank) {
  auto end = [](int64_t offset, int64_t pitch, const Copy& c) {
    return static_cast<size_t>(offset + (c.rows - 1) * pitch + c.width);
  };
  for (const Copy& c : site.copies[rank]) {
    const auto operand = static_cast<size_t>(c.operand), result = static_cast<size_t>(c.result);
    if (operand >= call.sources.size() || result >= call.buffers.size() ||
        end(c.src_offset, c.src_pitch, c) > call.source_bytes[operand] ||
        end(c.dst_offset, c.dst_pitch, c) > call.buffer_bytes[result] ||
        c.slot >= static_cast<int64_t>(call.slots)) {
      return ffi::Error::InvalidArgument(
          site.name + ": a copy of rank " + std::to_string(c.src_rank) + "'s operand " +
          std::to_string(c.operand) + " to rank " + std::to_string(rank) + "'s result " +
          std::to_string(c.result) + " leaves its buffers");
    }
  }
  return ffi::Error::Success();
}

// Addresses of what the kernels of other ranks touch, in the order of the site's list.
ffi::Error FarAddresses(const Site& site, const Call& call, std::vector<const void*>* out) {
  for (int64_t code : site.far) {
    const auto result = static_cast<size_t>(-1 - code);
    if (code >= 0 && static_cast<size_t>(code) < call.sources.size()) {
      out->push_back(call.sources[code]);
    } else if (code < 0 && result < call.buffers.size()) {
      out->push_back(call.buffers[result]);
    } else if (code < 0 && result == call.buffers.size()) {
      out->push_back(call.flags);
    } else {
      return ffi::Error::InvalidArgument(site.name + ": far array " + std::to_string(code) +
                                         " is neither an operand nor a result");
    }
  }
  const size_t needed = site.far.size() * site.ranks * sizeof(int64_t);
  if (!site.far.empty() && (call.buffers.empty() || call.buffer_bytes.back() < needed)) {
    return ffi::Error::InvalidArgument(
        site.name + ": the last buffer holds addresses and needs " + std::to_string(needed) +
        " bytes");
  }
  return ffi::Error::Success();
}

// The addresses of all ranks, array by array.
std::vector<int64_t> AddressTable(const Site& site, const Meeting* meeting,
                                  const std::vector<const void*>& own) {
  std::vector<int64_t> table;
  for (size_t i = 0; i < site.far.size(); ++i) {
    for (size_t rank = 0; rank < site.ranks; ++rank) {
      const void* address = meeting ? meeting->cards[rank].far[i] : own[i];
      table.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(address)));
    }
  }
  return table;
}

// The start that a join belongs to.
ffi::Error TakePending(ffi::RemainingArgs args, int32_t ordinal, int64_t run, Pending* out) {
  ffi::ErrorOr<ffi::AnyBuffer> flags = args.get<ffi::AnyBuffer>(0);
  if (!flags.has_value()) return flags.error();
  return TheLedger().Take(ordinal, flags->untyped_data(), run, out);
}

}  // namespace

#endif  // SYNCOPATE_JAX_NATIVE_CALL_SITES_H_
