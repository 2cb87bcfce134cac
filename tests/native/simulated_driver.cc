// The CUDA handlers on a simulated driver: streams run their operations in order, and beside each
// other in an order drawn anew for each seed; copies are done a byte at a time.
//
//   simulated_driver FLAG EARLY OWN_FIRST JOINED SEEDS [broken]
//
// After the handlers stands a kernel, which waits for the flags and looks at a chunk whenever its
// flag is up; where calls are joined, a check behind the join. Memory is overwritten between calls,
// by what their stream did before. Prints what went wrong first, and exits with 1.
// "broken": a stream does not order an operation of 4 bytes behind the one before it.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <string>
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

CUresult Push(CUstream stream, Step step, bool small = false) {
  std::deque<Step>& ops = static_cast<Stream*>(stream)->ops;
  ops.insert(broken && small && !ops.empty() ? ops.end() - 1 : ops.end(), std::move(step));
  return 0;
}

CUresult Copy2D(CUdeviceptr dst, size_t dst_pitch, CUdeviceptr src, size_t src_pitch, size_t width,
                size_t rows, CUstream stream) {
  auto at = std::make_shared<size_t>(0);
  auto one = [=] {
    const size_t row = *at / width, byte = *at % width;
    reinterpret_cast<char*>(dst)[row * dst_pitch + byte] =
        reinterpret_cast<const char*>(src)[row * src_pitch + byte];
    ++progress;
    return ++*at == width * rows;
  };
  if (width * rows != 4) return Push(stream, one);
  auto word = [=] {  // an aligned word is written at once
    while (!one()) {
    }
    return true;
  };
  return Push(stream, word, true);
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
  auto write = [=] { return *reinterpret_cast<uint32_t*>(at) = value, ++progress, true; };
  return Push(stream, write, true);
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
CUresult Memset(CUdeviceptr at, unsigned value, size_t count, CUstream stream) {
  auto next = std::make_shared<size_t>(0);
  return Push(stream, [=] {
    reinterpret_cast<unsigned*>(at)[*next] = value;
    ++progress;
    return ++*next == count;
  });
}
CUresult CopyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return Copy2D(dst, bytes, src, bytes, bytes, 1, stream);
}
CUresult CopyBox(const Memcpy2D* box, CUstream stream) {
  return Copy2D(box->dst, box->dst_pitch, box->src, box->src_pitch, box->width, box->height,
                stream);
}
CUresult HostAlloc(void** out, size_t bytes, unsigned) { return *out = std::malloc(bytes), 0; }
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
  int32_t where[2] = {};
  char source[kBytes], buffer[kBytes];
  alignas(8) int32_t flags[kChunks];
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

void Add(std::vector<int64_t>* table, std::initializer_list<int64_t> copy) {
  table->insert(table->end(), copy);
}

std::string Run(int flag, bool early, bool own_first, bool joined) {
  std::vector<int64_t> table;
  for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
    const int64_t own = chunk == 0 && own_first;  // rows on the kernel's stream, without a flag
    const int64_t at = chunk * kChunk, rest = at + own * kPitch, lane = joined ? 1 + chunk % 2 : 1;
    if (own) Add(&table, {0, 0, 0, at, kPitch, 0, at, kPitch, kWidth, own, -1, 0, 0});
    Add(&table, {0, 0, 0, rest, kPitch, 0, rest, kPitch, kWidth, kRows - own, chunk, 1, lane});
  }
  auto made = NewSite<kCuda>("simulated", 1, 1000, joined, early, flag,
                             ffi::Span<const int64_t>(table.data(), table.size()),
                             ffi::Span<const int64_t>(nullptr, 0));
  CudaState* state = made->get();
  static CUstream own = [] {
    CUstream stream = nullptr;
    NewStream(&stream, 0);
    return stream;
  }();
  Memory memory;
  int64_t two = 2, bytes = kBytes, flags = kChunks;
  XLA_FFI_Buffer where = Buffer(XLA_FFI_DataType_S32, memory.where, &two);
  XLA_FFI_Buffer source = Buffer(XLA_FFI_DataType_U8, memory.source, &bytes);
  XLA_FFI_Buffer buffer = Buffer(XLA_FFI_DataType_U8, memory.buffer, &bytes);
  XLA_FFI_Buffer raised = Buffer(XLA_FFI_DataType_S32, memory.flags, &flags);
  XLA_FFI_ArgType in[] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType out[] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};
  void *given[] = {&where, &source}, *results[] = {&buffer, &raised}, *ends[] = {&buffer, &raised};
  XLA_FFI_Args start_args{XLA_FFI_Args_STRUCT_SIZE, nullptr, 2, in, given};
  XLA_FFI_Args join_args{XLA_FFI_Args_STRUCT_SIZE, nullptr, 2, in, ends};
  XLA_FFI_Rets rets{XLA_FFI_Rets_STRUCT_SIZE, nullptr, 2, out, results};

  for (int call = 0; call < 6; ++call) {
    auto next = std::make_shared<size_t>(0);
    Push(own, [&memory, next] {  // who had this memory before, and what the next call is given
      memory.source[*next] = static_cast<char>(draw());
      memory.buffer[*next] = static_cast<char>(~memory.source[*next]);
      memory.flags[*next % kChunks] = 1;
      ++progress;
      return ++*next == kBytes;
    });
    ffi::Error error = CudaStart(own, ffi::RunId{call / 2}, 0, state, ffi::RemainingArgs(&start_args, 0),
                                 ffi::RemainingRets(&rets, 0), ffi::Dictionary(nullptr));
    if (error.failure()) return error.message();
    if (joined) {
      error = CudaJoin(own, ffi::RunId{call / 2}, 0, ffi::RemainingArgs(&join_args, 0),
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
      {"cuMemsetD32Async", reinterpret_cast<void*>(Memset)},
      {"cuMemcpyAsync", reinterpret_cast<void*>(CopyAsync)},
      {"cuMemcpy2DAsync_v2", reinterpret_cast<void*>(CopyBox)},
      {"cuMemHostAlloc", reinterpret_cast<void*>(HostAlloc)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(Attribute)},
  };
  return known.at(name);
}

int main(int count, char** given) {
  if (count < 6) return 2;
  broken = count > 6;
  for (int seed = 0; seed < std::atoi(given[5]); ++seed) {
    draw.seed(seed);
    const std::string wrong = Run(std::atoi(given[1]), std::atoi(given[2]), std::atoi(given[3]),
                                  std::atoi(given[4]));
    if (!wrong.empty()) {
      std::printf("seed %d: %s\n", seed, wrong.c_str());
      return 1;
    }
  }
  return 0;
}
