// XLA FFI handlers of the copy engine: chunks move beside a kernel, which waits for a flag a chunk.
//
//   start   takes zeroed flags, meets the handlers of the other devices of the process to exchange
//           addresses, and begins the copies into this device, each with a flag behind it; then the
//           kernel runs beside them
//   wait    CPU only, in the kernel's place: returns once the flags have the wanted counts
//   join    after the kernel: what the peers copy from this device stays alive until they are done
//
// All copies into a device are issued by its own handler (pulls), in the order of a table. On CUDA
// the driver is opened at run time, so that this file needs no CUDA header and no nvcc; on the CPU
// the same protocol runs with memcpy on a thread, so that it can be tested without a GPU.
//
// A call site is one custom call of one executable. Its state, made when the executable is loaded,
// is shared by all devices of the process and holds the table, events and meetings.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

// ---- The CUDA driver, opened at run time --------------------------------------------------------

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

// ---- What the handlers cost the host ------------------------------------------------------------

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

// ---- Meetings: all ranks of a call exchange what the others need ---------------------------------

struct Card {
  std::vector<const void*> sources;
  std::vector<const void*> far;  // what the kernels of other ranks touch
  CUevent event = nullptr;
  std::shared_future<void> done;
};

struct Meeting {
  explicit Meeting(size_t ranks) : here(ranks), cards(ranks) {}
  std::vector<char> here;
  std::vector<Card> cards;
  std::atomic<size_t> arrived{0};
  size_t left = 0;
  bool failed = false;
};

using Key = std::tuple<int64_t, int64_t, int64_t, int>;  // run, call in the run, group, phase

std::string Ranks(const std::vector<char>& here, bool wanted) {
  std::string out;
  int found = 0;
  for (size_t r = 0; r < here.size(); ++r) {
    if ((here[r] != 0) != wanted) continue;
    out += (found++ ? ", " : "") + std::to_string(r);
  }
  return (found == 1 ? "rank " : "ranks ") + out;
}

class Meetings {
 public:
  ffi::Error Meet(const std::string& site, const char* phase, const Key& key, int64_t rank,
                  size_t ranks, std::chrono::milliseconds limit, Card card,
                  std::shared_ptr<Meeting>* out) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::shared_ptr<Meeting>& entry = open_[key];
    if (!entry) entry = std::make_shared<Meeting>(ranks);
    std::shared_ptr<Meeting> meeting = entry;
    if (meeting->failed) {
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                        site + ": rank " + std::to_string(rank) + " came to the " + phase +
                            " when " + Ranks(meeting->here, true) + " of " +
                            std::to_string(ranks) + " had waited " +
                            std::to_string(limit.count()) +
                            " ms and given it up; every rank must make the same calls in the "
                            "same order, within that time");
    }
    if (meeting->here[rank]) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        site + ": two devices say they are rank " + std::to_string(rank) +
                            " at the " + phase);
    }
    meeting->cards[rank] = std::move(card);
    meeting->here[rank] = 1;
    if (meeting->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks) {
      changed_.notify_all();
    } else {
      // Peers come within microseconds as a rule: look for a while before going to sleep.
      lock.unlock();
      const Clock::time_point spin = Clock::now() + std::chrono::microseconds(40);
      while (meeting->arrived.load(std::memory_order_acquire) < ranks && Clock::now() < spin) {
      }
      lock.lock();
      const bool all = changed_.wait_for(
          lock, limit, [&] { return meeting->arrived.load() == ranks || meeting->failed; });
      if (!all || meeting->failed) {
        if (!meeting->failed) {
          meeting->failed = true;
          changed_.notify_all();
        }
        return ffi::Error(
            ffi::ErrorCode::kDeadlineExceeded,
            site + ": " + Ranks(meeting->here, false) + " of " + std::to_string(ranks) +
                " did not come to the " + phase + " within " + std::to_string(limit.count()) +
                " ms (here: " + Ranks(meeting->here, true) +
                "); every rank must make the same calls in the same order, and all ranks must "
                "be devices of one process");
      }
    }
    if (++meeting->left == ranks) open_.erase(key);
    *out = std::move(meeting);
    return ffi::Error::Success();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Meeting>> open_;
};

// ---- Call sites ---------------------------------------------------------------------------------

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

// One device at one call site.
struct Seat {
  int ordinal = 0;
  int64_t rank = 0, group = 0;
  int64_t run = -1, call = 0;
  std::vector<CUstream> sides;   // of lane 1, 2, ...
  std::vector<CUevent> ready, done, passed;  // a ring each; passed: one a side stream but the first
  std::vector<int64_t> addresses[kRing];  // kept until they have been copied
  size_t next = 0;

  ~Seat() {
    for (const std::vector<CUevent>* events : {&ready, &done, &passed}) {
      for (CUevent event : *events) Pool::Of(ordinal).Return(event);
    }
  }

  // The calls of a run are counted, since a loop runs one call site several times.
  Key Next(int64_t run_id, int phase) {
    call = run_id == run ? call + 1 : 0;
    run = run_id;
    next = (next + 1) % kRing;
    return {run_id, call, group, phase};
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
    site->copies[copy.dst_rank].push_back(copy);
    site->sides = std::max(site->sides, static_cast<size_t>(copy.lane));
  }
  auto state = std::make_unique<SiteState<platform>>();
  state->site = std::move(site);
  return state;
}

// ---- Operands and results -----------------------------------------------------------------------

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

// ---- CUDA ---------------------------------------------------------------------------------------

using CudaState = SiteState<kCuda>;
using CpuState = SiteState<kCpu>;

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
  *out = seat.get();
  site.seats[ordinal] = std::move(seat);
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
ffi::Error TakePending(ffi::RemainingArgs args, int32_t ordinal, int64_t run, Pending* out) {
  ffi::ErrorOr<ffi::AnyBuffer> flags = args.get<ffi::AnyBuffer>(0);
  if (!flags.has_value()) return flags.error();
  return TheLedger().Take(ordinal, flags->untyped_data(), run, out);
}

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

// ---- CPU ----------------------------------------------------------------------------------------

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
  const Key key = seat->Next(run.run_id, 0);
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
  if (ffi::Error error = Results(args, 1, rets, &results); error.failure()) {
    return Ended(std::move(error));
  }
  return Beside([=]() mutable {
    Site& site = *pending.site;
    pending.done.wait();
    if (site.ranks > 1) {
      std::get<3>(pending.key) = 1;
      std::shared_ptr<Meeting> meeting;
      const Clock::time_point since = Clock::now();
      ffi::Error error =
          site.meetings.Meet(site.name, "end of the copies", pending.key, pending.seat->rank,
                             site.ranks, site.limit, Card{{}, {}, nullptr, pending.done}, &meeting);
      if (error.failure()) return error;
      for (const Card& card : meeting->cards) card.done.wait();
      timer->Waited(since);
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
