// The CUDA handlers on a simulated driver: streams run their operations in order, and beside each
// other in an order drawn anew for each seed; copies are done a byte at a time.
//
//   simulated_driver SEEDS [broken]
//
// After the handlers stands a kernel, which waits for the flags and looks at a chunk whenever its
// flag is up; every other seed, a check behind a join instead. Memory is overwritten between calls,
// by what their stream did before. Prints what went wrong first, and exits with 1.
// "broken": a stream does not order the write of a flag behind the copy before it.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
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
CUresult Synchronize(CUstream) { return 0; }
CUresult WaitFor(CUstream stream, CUevent event, unsigned) {
  Token token = static_cast<Event*>(event)->token;
  return Push(stream, [token] { return *token ? (++progress, true) : false; });
}
CUresult WriteValue(CUstream stream, CUdeviceptr at, uint32_t value, unsigned) {
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
    std::deque<Step>& ops = streams[pick(draw)]->ops;
    const int before = progress;
    if (!ops.empty() && ops.front()()) ops.pop_front();
    if (progress != before) idle = 0;
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
  static CUstream own = nullptr;
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
    ffi::Error error = CudaStart(own, run, 0, state, ffi::RemainingArgs(&start_args, 0),
                                 ffi::RemainingRets(&rets, 0), ffi::Dictionary(nullptr));
    if (error.failure()) return error.message();
    if (joined) {
      error = CudaJoin(own, run, 0, ffi::RemainingArgs(&join_args, 0),
                       ffi::RemainingRets(&rets, 0));
      if (error.failure()) return error.message();
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
  broken = count > 2;
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
