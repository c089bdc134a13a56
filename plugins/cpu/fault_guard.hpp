// Ends the process with one line, instead of a core dump, when mapped weights can no longer be read:
// the file was truncated, or the network file system that it lies on went away (SIGBUS).
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <stdexcept>

namespace trtc::engine {

// What the signal handler reads. A slot is taken while `begin` is not null, which is written last.
struct GuardedRange {
  std::atomic<const std::byte*> begin{nullptr};
  const std::byte* end = nullptr;
  char message[512] = {};
  std::size_t message_bytes = 0;
  int exit_status = 1;
};

namespace {

constexpr int kMaxGuards = 64;
GuardedRange guarded_ranges[kMaxGuards];
std::atomic<bool> guard_slots_taken[kMaxGuards];
std::atomic<bool> handler_installed{false};
struct sigaction handler_before;

// Async-signal-safe: write, _exit and sigaction only.
void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  for (const GuardedRange& range : guarded_ranges) {
    const std::byte* begin = range.begin.load(std::memory_order_acquire);
    if (begin != nullptr && address >= begin && address < range.end) {
      [[maybe_unused]] const auto written = ::write(STDERR_FILENO, range.message, range.message_bytes);
      ::_exit(range.exit_status);
    }
  }
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) {
    handler_before.sa_sigaction(number, info, context);
  } else if (handler_before.sa_handler == SIG_DFL || handler_before.sa_handler == SIG_IGN) {
    ::signal(SIGBUS, SIG_DFL);  // the access is repeated, and ends the process as it would have
  } else {
    handler_before.sa_handler(number);
  }
}

// Once a shared object. Engines of several form a chain of handlers; one that was installed again on
// top of those that call it would make the chain a cycle.
void install_handler() {
  if (handler_installed.exchange(true)) return;
  struct sigaction handler = {};
  handler.sa_sigaction = on_bus_error;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&handler.sa_mask);
  ::sigaction(SIGBUS, nullptr, &handler_before);
  ::sigaction(SIGBUS, &handler, nullptr);
}

}  // namespace

// Guards a range of memory for as long as it lives.
class FaultGuard {
 public:
  // `message` null: guards nothing.
  FaultGuard(const void* memory, std::size_t bytes, const char* message, int exit_status) {
    if (message == nullptr) return;
    for (int i = 0; i < kMaxGuards; ++i) {
      if (guard_slots_taken[i].exchange(true)) continue;
      slot_ = i;
      break;
    }
    if (slot_ < 0) throw std::runtime_error("more than 64 engines of one shared object are open");
    GuardedRange& range = guarded_ranges[slot_];
    const int length = std::snprintf(range.message, sizeof range.message, "%s\n", message);
    range.message_bytes = std::min<std::size_t>(length < 0 ? 0 : length, sizeof range.message - 1);
    range.exit_status = exit_status;
    const auto* begin = static_cast<const std::byte*>(memory);
    range.end = begin + bytes;
    range.begin.store(begin, std::memory_order_release);
    install_handler();
  }
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;
  ~FaultGuard() {
    if (slot_ < 0) return;
    guarded_ranges[slot_].begin.store(nullptr, std::memory_order_release);
    guard_slots_taken[slot_].store(false);
  }

 private:
  int slot_ = -1;
};

}  // namespace trtc::engine
