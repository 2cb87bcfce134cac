// The CUDA handlers on a simulated driver: streams run their operations in order, and beside each
// other in an order drawn anew for each seed; copies are done a byte at a time.
//
//   simulated_driver SEEDS [broken | failing | threads]
//
// After the handlers stands a kernel, which waits for the flags and looks at a chunk whenever its
// flag is up; every other seed, a check behind a join instead. Memory is overwritten between calls,
// by what their stream did before. Prints what went wrong first, and exits with 1.
// "broken": a stream does not order the write of a flag behind the copy before it.
// "failing": the driver refuses a call; no copy is left on a side stream when the handler says so.
// "threads": no driver at all: seats and meetings, by several threads at once.

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

static void* FakeOpen(const char*, int) { return reinterpret_cast<void*>(1); }
static void* FakeSymbol(void*, const char* name);
#define dlopen FakeOpen
#define dlsym FakeSymbol
#include "handlers.cc"
#undef dlopen
#undef dlsym

namespace {

using Token = std::shared_ptr<bool>;
using Step = std::function<bool()>;  // one step of an operation: whether it is done

struct Stream {
  std::deque<Step> ops;
};
struct Event {
  Token token = std::make_shared<bool>(true);
};

std::vector<std::unique_ptr<Stream>> streams;
std::vector<std::unique_ptr<Event>> events;
std::mt19937 draw;
int progress = 0;
bool broken = false;
int refused = -1;  // how many calls that begin work succeed before one fails; -1: all

bool Refused() { return refused >= 0 && refused-- == 0; }

CUresult Push(CUstream stream, Step step) {
  static_cast<Stream*>(stream)->ops.push_back(std::move(step));
  return 0;
}

// An operation of `count` steps, which are called with their number.
CUresult Repeat(CUstream stream, size_t count, std::function<void(size_t)> step) {
  auto at = std::make_shared<size_t>(0);
  return Push(stream, [=] { return step(*at), ++progress, ++*at == count; });
}

CUresult ErrorName(CUresult, const char** name) { return *name = "simulated", 0; }
CUresult NewStream(CUstream* out, unsigned) {
  streams.push_back(std::make_unique<Stream>());
  return *out = streams.back().get(), 0;
}
// One step of a stream; whether it got on.
bool Advance(size_t number) {
  std::deque<Step>& ops = streams[number]->ops;
  const int before = progress;
  if (!ops.empty() && ops.front()()) ops.pop_front();
  return progress != before;
}
CUresult Synchronize(CUstream stream) {
  for (bool any = true; any && !static_cast<Stream*>(stream)->ops.empty();) {
    any = false;
    for (size_t number = 0; number < streams.size(); ++number) any |= Advance(number);
  }
  return !static_cast<Stream*>(stream)->ops.empty();
}
CUresult WaitFor(CUstream stream, CUevent event, unsigned) {
  if (Refused()) return 1;
  Token token = static_cast<Event*>(event)->token;
  return Push(stream, [token] { return *token ? (++progress, true) : false; });
}
CUresult WriteValue(CUstream stream, CUdeviceptr at, uint32_t value, unsigned) {
  if (Refused()) return 1;
  std::deque<Step>& ops = static_cast<Stream*>(stream)->ops;
  ops.insert(broken && !ops.empty() ? ops.end() - 1 : ops.end(),
             [=] { return *reinterpret_cast<uint32_t*>(at) = value, ++progress, true; });
  return 0;
}
CUresult NewEvent(CUevent* out, unsigned) {
  events.push_back(std::make_unique<Event>());
  return *out = events.back().get(), 0;
}
CUresult Record(CUevent event, CUstream stream) {
  Token token = std::make_shared<bool>(false);
  static_cast<Event*>(event)->token = token;
  return Push(stream, [token] { return *token = true, ++progress, true; });
}
CUresult CopyBox(const Memcpy2D* given, CUstream stream) {
  if (Refused()) return 1;
  return Repeat(stream, given->width * given->height, [box = *given](size_t i) {
    const size_t row = i / box.width, byte = i % box.width;
    reinterpret_cast<char*>(box.dst)[row * box.dst_pitch + byte] =
        reinterpret_cast<const char*>(box.src)[row * box.src_pitch + byte];
  });
}
CUresult CopyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  Memcpy2D box;
  std::tie(box.dst, box.src, box.width, box.height) = std::tuple(dst, src, bytes, 1);
  return CopyBox(&box, stream);
}
CUresult Attribute(void* out, int, CUdeviceptr) {
  return *static_cast<unsigned*>(out) = kMemoryTypeHost, 0;
}

// One step of a stream drawn at random, until none has anything to do; false: none gets on.
bool RunAll() {
  std::vector<double> weights;
  for (size_t i = 0; i < streams.size(); ++i) weights.push_back(1 << draw() % 8);
  std::discrete_distribution<size_t> pick(weights.begin(), weights.end());
  for (int idle = 0; idle < 20000; ++idle) {
    bool any = false;
    for (const auto& stream : streams) any |= !stream->ops.empty();
    if (!any) return true;
    if (Advance(pick(draw))) idle = 0;
  }
  return false;
}

XLA_FFI_Buffer Buffer(XLA_FFI_DataType dtype, void* data, int64_t* size) {
  XLA_FFI_Buffer buffer{};
  buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  buffer.dtype = dtype;
  buffer.data = data;
  buffer.rank = 1;
  buffer.dims = size;
  return buffer;
}

constexpr int64_t kChunks = 5, kRows = 3, kWidth = 8, kPitch = 10;
constexpr int64_t kChunk = kRows * kPitch, kBytes = kChunks * kChunk;

struct Memory {
  char source[kBytes], buffer[kBytes];
  alignas(8) int32_t flags[kChunks + kPlace], zeros[kChunks + kPlace] = {};
  std::string wrong;

  bool There(int64_t chunk) const {
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t at = chunk * kChunk + row * kPitch;
      if (std::memcmp(source + at, buffer + at, kWidth) != 0) return false;
    }
    return true;
  }

  // Whether all flags are up; a flag that is up ahead of its data is noted.
  bool Look(const char* when) {
    bool all = true;
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
      if (flags[chunk] == 0) {
        all = false;
      } else if (wrong.empty() && (flags[chunk] != 1 || !There(chunk))) {
        wrong = "chunk " + std::to_string(chunk) + " is announced and not there, " + when;
      }
    }
    return all;
  }
};

// Whether all that the side streams were given is done.
bool Drained() {
  bool all = true;
  for (size_t number = 1; number < streams.size(); ++number) all &= streams[number]->ops.empty();
  return all;
}

std::string Run(bool joined, int lanes) {
  std::vector<int64_t> table;
  for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
    const int64_t at = chunk * kChunk, lane = 1 + chunk % lanes;
    table.insert(table.end(),
                 {0, 0, 0, at, kPitch, 0, at, kPitch, kWidth, kRows, chunk, 1, lane});
  }
  auto made = NewSite<kCuda>("simulated", 1, 1000, joined,
                             ffi::Span<const int64_t>(table.data(), table.size()),
                             ffi::Span<const int64_t>(nullptr, 0));
  CudaState* state = made->get();
  static CUstream own = nullptr;  // the first stream
  if (own == nullptr) NewStream(&own, 0);
  Memory memory;
  int64_t bytes = kBytes, flags = kChunks + kPlace;
  XLA_FFI_Buffer zeros = Buffer(XLA_FFI_DataType_S32, memory.zeros, &flags);
  XLA_FFI_Buffer source = Buffer(XLA_FFI_DataType_U8, memory.source, &bytes);
  XLA_FFI_Buffer buffer = Buffer(XLA_FFI_DataType_U8, memory.buffer, &bytes);
  XLA_FFI_Buffer raised = Buffer(XLA_FFI_DataType_S32, memory.flags, &flags);
  XLA_FFI_ArgType in[] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType out[] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};
  void *given[] = {&zeros, &source}, *results[] = {&buffer, &raised}, *ends[] = {&raised, &buffer};
  XLA_FFI_Args start_args{XLA_FFI_Args_STRUCT_SIZE, nullptr, 2, in, given};
  XLA_FFI_Args join_args{XLA_FFI_Args_STRUCT_SIZE, nullptr, 2, in, ends};
  XLA_FFI_Rets rets{XLA_FFI_Rets_STRUCT_SIZE, nullptr, 2, out, results};

  for (int call = 0; call < 6; ++call) {
    const bool in_place = call % 3 > 0;
    given[0] = in_place ? &raised : &zeros;
    Repeat(own, kBytes, [=, &memory](size_t i) {  // who had this memory before, and new operands
      memory.source[i] = static_cast<char>(draw());
      memory.buffer[i] = static_cast<char>(~memory.source[i]);
      memory.flags[i % kChunks] = in_place ? 0 : 1;
    });
    const ffi::RunId run{call / 2};
    if (refused >= 0) RunAll();  // what is left after an error is then of this call
    ffi::Error error = CudaStart(own, run, 0, state, ffi::RemainingArgs(&start_args, 0),
                                 ffi::RemainingRets(&rets, 0), ffi::Dictionary(nullptr));
    if (error.failure()) return Drained() ? error.message() : "copies go on after an error";
    if (joined) {
      error = CudaJoin(own, run, 0, ffi::RemainingArgs(&join_args, 0),
                       ffi::RemainingRets(&rets, 0));
      if (error.failure()) return Drained() ? error.message() : "copies go on after an error";
      Push(own, [&memory] {
        if (!memory.Look("after the join") && memory.wrong.empty()) {
          memory.wrong = "a flag is not up after the join";
        }
        return ++progress, true;
      });
    } else {
      Push(own, [&memory] { return memory.Look("in the kernel") ? (++progress, true) : false; });
    }
  }
  const bool ended = RunAll();
  if (memory.wrong.empty() && !ended) memory.wrong = "no stream gets on";
  return memory.wrong;
}

// Every call that begins work fails once.
std::string Failing() {
  int failed = 0;
  for (int good = 0;; ++good) {
    for (const auto& stream : streams) stream->ops.clear();
    refused = good;
    draw.seed(good);
    const std::string said = Run(good % 2 == 1, 2);
    if (refused >= 0) return failed > 40 ? "" : "only " + std::to_string(failed) + " calls failed";
    if (said.find("failed: simulated (1)") == std::string::npos) return "said: " + said;
    ++failed;
  }
}

constexpr int kThreads = 8;

void AtOnce(const std::function<void(int)>& body) {
  std::atomic<int> here{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      ++here;
      while (here < kThreads) {
      }
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::string Threads(int seeds) {
  for (int seed = 0; seed < seeds; ++seed) {
    Site site;
    site.ranks = 1;
    site.copies.resize(1);
    const Call call;
    Seat* got[kThreads] = {};
    std::vector<Turn> turns[kThreads];
    AtOnce([&](int i) {
      if (FindSeat(site, call, 0, nullptr, &got[i]).failure()) return;
      for (int run = 0; run < 20; ++run) turns[i].push_back(got[i]->Next(run % 2, 0));
    });
    std::set<Key> keys;
    for (int i = 0; i < kThreads; ++i) {
      if (got[i] != site.seats[0].get()) return "a thread has a seat that is not the device's";
      for (const Turn& turn : turns[i]) keys.insert(turn.key);
    }
    if (keys.size() != kThreads * 20 || std::get<1>(*keys.rbegin()) != kThreads * 10 - 1) {
      return "calls are counted wrongly";
    }
  }
  return "";
}

// What one of two ranks is told.
std::string Meet(Meetings& meetings, int64_t run, int rank) {
  std::shared_ptr<Meeting> out;
  ffi::Error error = meetings.Meet("site", "start", Key{run, 0, 0, 0}, rank, 2,
                                   std::chrono::milliseconds(1), Card{}, &out);
  return error.failure() ? error.message() : "met";
}

std::string Ends() {
  Meetings meetings;
  std::string wrong;
  auto check = [&](int64_t run, int rank, const char* wanted) {
    const std::string said = Meet(meetings, run, rank);
    if (said.find(wanted) == std::string::npos) wrong += "said: " + said + "\n";
  };
  const char *alone = "of 2 did not come to the start", *late = "rank 1 came to the start when rank 0";
  check(0, 0, alone);
  check(0, 1, late);
  check(0, 1, alone);  // all had left: under the same key they meet anew
  // Ranks that never come are waited for by the last failed meetings alone.
  for (int64_t run = 1; run <= 20; ++run) check(run, 0, alone);
  check(20, 1, late);
  check(2, 1, alone);
  return wrong;
}

}  // namespace

static void* FakeSymbol(void*, const char* name) {
  static const std::map<std::string, void*> known = {
      {"cuGetErrorName", reinterpret_cast<void*>(ErrorName)},
      {"cuStreamCreate", reinterpret_cast<void*>(NewStream)},
      {"cuStreamSynchronize", reinterpret_cast<void*>(Synchronize)},
      {"cuStreamWaitEvent", reinterpret_cast<void*>(WaitFor)},
      {"cuStreamWriteValue32_v2", reinterpret_cast<void*>(WriteValue)},
      {"cuEventCreate", reinterpret_cast<void*>(NewEvent)},
      {"cuEventRecord", reinterpret_cast<void*>(Record)},
      {"cuMemcpyAsync", reinterpret_cast<void*>(CopyAsync)},
      {"cuMemcpy2DAsync_v2", reinterpret_cast<void*>(CopyBox)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(Attribute)},
  };
  return known.at(name);
}

int main(int count, char** given) {
  if (count < 2) return 2;
  const std::string mode = count > 2 ? given[2] : "";
  broken = mode == "broken";
  if (mode == "failing" || mode == "threads") {
    const std::string wrong = mode == "failing" ? Failing() : Threads(std::atoi(given[1])) + Ends();
    std::printf("%s", wrong.c_str());
    return !wrong.empty();
  }
  for (int seed = 0; seed < std::atoi(given[1]); ++seed) {
    draw.seed(seed);
    const std::string wrong = Run(seed % 2 == 1, 1 + seed / 2 % 2);
    if (!wrong.empty()) {
      std::printf("seed %d: %s\n", seed, wrong.c_str());
      return 1;
    }
  }
  return 0;
}
