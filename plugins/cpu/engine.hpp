// The C ABI of a compiled engine, and the loop that runs its plan.
//
// A generated engine.cpp includes this file, defines `trtc::engine::kPlan` (tables of calls and of
// their arguments) and expands TRTC_EXPORT_ENGINE. Everything specific to a model is in the tables
// and in the kernels' template constants; nothing here knows a model.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "context.hpp"
#include "fault_guard.hpp"
#include "thread_pool.hpp"
#include "types.hpp"

extern "C" {

// Identity of a compiled engine; the loader compares it with the manifest.
struct trtc_engine_info_t {
  std::int32_t abi_version;  // STEP_ABI_VERSION of protos/manifest.py
  const char* isa;
  const char* plan_digest;  // SHA-256 of plan.json, in hex
  std::int64_t weights_bytes;
  std::int64_t arena_bytes;
};

struct trtc_engine_options_t {
  const void* weights;  // data section of weights.safetensors, 64-byte aligned, outlives the engine
  std::int64_t weights_bytes;
  std::int32_t num_threads;
  std::int32_t num_cpus;  // 0: do not pin
  const std::int32_t* cpus;
  const char* fault_message;  // written to stderr when the weights cannot be read any more; null: nothing is done
  std::int32_t fault_status;  // exit status of the process then
};

// One ragged batch; see "Step ABI" in docs. All arrays belong to the caller and are only read,
// but for `pools` and `logits`.
struct trtc_engine_step_t {
  const std::int32_t* token_ids;     // [T]
  const std::int32_t* positions;     // [T]
  const std::int32_t* slots;         // [T] of each group of the cache layout, one after the other
  const std::int32_t* query_start;   // [B + 1]
  const std::int32_t* context_lens;  // [B]
  const std::int32_t* page_table;    // [B, P] of each group
  const std::int32_t* logit_rows;    // [R]
  std::int64_t num_tokens;           // T
  std::int64_t num_sequences;        // B
  std::int64_t num_logit_rows;       // R
  std::int64_t page_table_width;     // P
  void* const* pools;                // [regions] of [num_pages, planes, page_size, kv_heads, head_dim]
  std::int64_t num_pages;
  float* logits;  // [R, vocab]
  std::int64_t only_largest;  // not 0: of a row's logits only the largest, and where it is, has to be right
};

enum trtc_engine_status_t : std::int32_t {
  TRTC_OK = 0,
  TRTC_INVALID_ARGUMENT = 1,
  TRTC_FAILED = 2,
};
}

namespace trtc::engine {

constexpr int kMaxArguments = 24;
constexpr int kMaxExtents = 6;
constexpr int kMaxThreads = 1024;

enum class Kind : std::uint8_t { kBuffer, kWeight, kStep, kPool, kLogits };
// An input of a step. Generated code lists them, in the order of protos/step.py.
using StepInput = const std::int32_t* trtc_engine_step_t::*;
enum class Extent : std::uint8_t { kTokens, kSequences, kLogitRows, kTableWidth, kPages, kCount };

// Where one tensor argument is.
struct Argument {
  std::uint8_t slot;  // index among the kernel's views; the others stay null (absent optionals)
  Kind kind;
  std::int32_t index;  // region of the pool, or number of a step input
  std::int32_t group;  // of the cache layout, where each has its own input
  std::int64_t offset;  // bytes from the base of its kind
  std::int64_t row_stride;  // elements; -1: the page table's width
};

struct Call {
  void (*run)(Context&, const View* views, const std::int64_t* extents);
  std::int32_t first_argument;
  std::int32_t num_arguments;
  Extent extents[kMaxExtents];  // the kernel's varying axes, in declared order
};

struct Limits {
  std::int64_t max_tokens;
  std::int64_t max_sequences;
  std::int64_t max_seq_len;
  std::int64_t num_positions;  // rows of the rotary tables
  std::int64_t page_size;
  std::int64_t vocab_size;
  std::int64_t num_groups;  // of the cache layout
};

struct Plan {
  const Call* calls;
  std::int64_t num_calls;
  const Argument* arguments;
  const StepInput* step_inputs;
  std::size_t (*scratch_bytes)(int num_threads);  // the most that any call needs
  Limits limits;
  trtc_engine_info_t info;
};

// Zeroed pages, which the system allocates on first touch.
class PageMemory {
 public:
  explicit PageMemory(std::int64_t bytes) : bytes_(bytes < 1 ? 1 : static_cast<std::size_t>(bytes)) {
    data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    ::madvise(data_, bytes_, MADV_HUGEPAGE);  // only a hint
#endif
  }
  PageMemory(const PageMemory&) = delete;
  PageMemory& operator=(const PageMemory&) = delete;
  ~PageMemory() { ::munmap(data_, bytes_); }

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw InvalidArgument(what);
}

// A bad index would read or write outside the pool; the check takes nanoseconds.
inline void validate(const Limits& limits, const trtc_engine_step_t& step) {
  const std::int64_t T = step.num_tokens, B = step.num_sequences, R = step.num_logit_rows;
  const std::int64_t P = step.page_table_width;
  require(T >= 1 && T <= limits.max_tokens, "num_tokens is outside 1..max_num_tokens");
  require(B >= 1 && B <= limits.max_sequences, "num_sequences is outside 1..max_batch_size");
  require(R >= 0 && R <= limits.max_tokens, "num_logit_rows is outside 0..max_num_tokens");
  require(P >= 1 && step.num_pages >= 1, "the page table or the pool is empty");
  const std::int64_t num_slots = step.num_pages * limits.page_size;
  for (std::int64_t i = 0; i < T; ++i) {
    require(step.token_ids[i] >= 0 && step.token_ids[i] < limits.vocab_size, "a token id is outside the vocabulary");
    require(step.positions[i] >= 0 && step.positions[i] < limits.num_positions, "a position is outside the rotary table");
  }
  for (std::int64_t i = 0; i < limits.num_groups * T; ++i) {
    require(step.slots[i] >= 0 && step.slots[i] < num_slots, "a slot is outside the pool");
  }
  require(step.query_start[0] == 0 && step.query_start[B] == T, "query_start does not span the tokens");
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t length = step.context_lens[b];
    const std::int64_t fresh = step.query_start[b + 1] - step.query_start[b];
    require(fresh >= 1, "a sequence has no new token");
    require(length >= fresh && length <= limits.max_seq_len, "a context length is outside its tokens..max_seq_len");
    const std::int64_t pages = (length + limits.page_size - 1) / limits.page_size;
    require(pages <= P, "a context does not fit its row of the page table");
    for (std::int64_t g = 0; g < limits.num_groups; ++g) {
      for (std::int64_t p = 0; p < pages; ++p) {
        const std::int32_t page = step.page_table[(g * B + b) * P + p];
        require(page >= 0 && page < step.num_pages, "a page id is outside the pool");
      }
    }
  }
  for (std::int64_t i = 0; i < R; ++i) {
    require(step.logit_rows[i] >= 0 && step.logit_rows[i] < T, "a logit row is outside the tokens");
  }
}

class Engine {
 public:
  Engine(const Plan& plan, const trtc_engine_options_t& options)
      : plan_(plan),
        weights_(checked_weights(plan, options)),
        guard_(options.weights, static_cast<std::size_t>(options.weights_bytes), options.fault_message,
               options.fault_status),
        threads_(options.num_threads, std::vector<int>(options.cpus, options.cpus + options.num_cpus)),
        arena_(plan.info.arena_bytes),
        scratch_bytes_(plan.scratch_bytes(threads_.size())),
        scratch_(static_cast<std::int64_t>(scratch_bytes_)) {}

  void step(const trtc_engine_step_t& step) {
    run_calls(step, [](std::int64_t, auto&& call) { call(); });
  }

  // The same step; seconds[i] is what call number i of the plan took.
  void time_calls(const trtc_engine_step_t& step, double* seconds, std::int64_t num_calls) {
    require(num_calls == plan_.num_calls, "the plan has another number of calls");
    run_calls(step, [&](std::int64_t i, auto&& call) {
      const auto begin = std::chrono::steady_clock::now();
      call();
      seconds[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    });
  }

 private:
  // Calls each(number, call) for every call of the plan, in order.
  template <class Each>
  void run_calls(const trtc_engine_step_t& step, Each&& each) {
    validate(plan_.limits, step);
    const std::int64_t extents[] = {step.num_tokens, step.num_sequences, step.num_logit_rows, step.page_table_width,
                                    step.num_pages};
    Context context{threads_, scratch_.data(), scratch_bytes_, step.only_largest != 0};
    for (std::int64_t i = 0; i < plan_.num_calls; ++i) {
      const Call& call = plan_.calls[i];
      View views[kMaxArguments] = {};
      for (std::int32_t j = 0; j < call.num_arguments; ++j) {
        const Argument& argument = plan_.arguments[call.first_argument + j];
        views[argument.slot] = resolve(argument, step);
      }
      std::int64_t values[kMaxExtents] = {};
      for (int j = 0; j < kMaxExtents && call.extents[j] != Extent::kCount; ++j) {
        values[j] = extents[static_cast<int>(call.extents[j])];
      }
      each(i, [&] {
        if (values[0] > 0) call.run(context, views, values);
      });
    }
  }

  static const std::byte* checked_weights(const Plan& plan, const trtc_engine_options_t& options) {
    require(options.weights_bytes == plan.info.weights_bytes, "the weights have another size than the plan");
    require(reinterpret_cast<std::uintptr_t>(options.weights) % 64 == 0, "the weights are not 64-byte aligned");
    require(options.num_threads >= 1 && options.num_threads <= kMaxThreads, "num_threads is outside 1..1024");
    require(options.num_cpus >= 0, "num_cpus is negative");
    return static_cast<const std::byte*>(options.weights);
  }

  View resolve(const Argument& argument, const trtc_engine_step_t& step) const {
    const std::int64_t stride = argument.row_stride < 0 ? step.page_table_width : argument.row_stride;
    return View{base(argument, step) + argument.offset, stride};
  }

  std::byte* base(const Argument& argument, const trtc_engine_step_t& step) const {
    switch (argument.kind) {
      case Kind::kBuffer:
        return arena_.data();
      case Kind::kWeight:
        return const_cast<std::byte*>(weights_);
      case Kind::kPool:
        return static_cast<std::byte*>(step.pools[argument.index]);
      case Kind::kLogits:
        return reinterpret_cast<std::byte*>(step.logits);
      case Kind::kStep:
        break;
    }
    const bool is_table = argument.row_stride < 0;
    const std::int64_t of_group = is_table ? step.num_sequences * step.page_table_width : step.num_tokens;
    const std::int32_t* input = step.*plan_.step_inputs[argument.index] + argument.group * of_group;
    return reinterpret_cast<std::byte*>(const_cast<std::int32_t*>(input));
  }

  const Plan& plan_;
  const std::byte* weights_;
  FaultGuard guard_;
  ThreadPool threads_;
  PageMemory arena_;
  std::size_t scratch_bytes_;
  PageMemory scratch_;
};

inline thread_local char last_error[256] = "";

// Runs `body`; an exception becomes a status and a message, because none may cross a C border.
template <class Body>
std::int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return TRTC_OK;
  } catch (const InvalidArgument& error) {
    std::snprintf(last_error, sizeof last_error, "%s", error.what());
    return TRTC_INVALID_ARGUMENT;
  } catch (const std::exception& error) {
    std::snprintf(last_error, sizeof last_error, "%s", error.what());
    return TRTC_FAILED;
  }
}

}  // namespace trtc::engine

#define TRTC_EXPORT extern "C" __attribute__((visibility("default")))

// trtc_engine_create returns null on failure; trtc_engine_last_error says why, in the same thread.
#define TRTC_EXPORT_ENGINE(plan)                                                                      \
  TRTC_EXPORT const trtc_engine_info_t* trtc_engine_info() { return &(plan).info; }                   \
  TRTC_EXPORT const char* trtc_engine_last_error() { return trtc::engine::last_error; }               \
  TRTC_EXPORT void* trtc_engine_create(const trtc_engine_options_t* options) {                        \
    trtc::engine::Engine* engine = nullptr;                                                           \
    trtc::engine::guarded([&] { engine = new trtc::engine::Engine((plan), *options); });              \
    return engine;                                                                                    \
  }                                                                                                   \
  TRTC_EXPORT std::int32_t trtc_engine_step(void* engine, const trtc_engine_step_t* step) {           \
    return trtc::engine::guarded([&] { static_cast<trtc::engine::Engine*>(engine)->step(*step); });   \
  }                                                                                                   \
  TRTC_EXPORT std::int32_t trtc_engine_time_calls(void* engine, const trtc_engine_step_t* step,          \
                                                  double* seconds, std::int64_t num_calls) {          \
    return trtc::engine::guarded(                                                                     \
        [&] { static_cast<trtc::engine::Engine*>(engine)->time_calls(*step, seconds, num_calls); });  \
  }                                                                                                   \
  TRTC_EXPORT void trtc_engine_destroy(void* engine) { delete static_cast<trtc::engine::Engine*>(engine); }
