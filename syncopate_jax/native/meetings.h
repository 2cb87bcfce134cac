// Meetings: all ranks of a call exchange what the others need, within a time limit.

#ifndef SYNCOPATE_JAX_NATIVE_MEETINGS_H_
#define SYNCOPATE_JAX_NATIVE_MEETINGS_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Card {
  std::vector<const void*> sources;
  std::vector<const void*> far;  // what the kernels of other ranks touch
  CUevent event = nullptr;
  std::shared_future<void> done;
};

// Failed meetings are kept for ranks that are yet to come, so many at most of a call site.
constexpr size_t kFailedMeetings = 16;

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
  // `out` is what the ranks have brought: all of them, or where the meeting fails, those that came.
  ffi::Error Meet(const std::string& site, const char* phase, const Key& key, int64_t rank,
                  size_t ranks, std::chrono::milliseconds limit, Card card,
                  std::shared_ptr<Meeting>* out) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::shared_ptr<Meeting>& entry = open_[key];
    if (!entry) entry = std::make_shared<Meeting>(ranks);
    std::shared_ptr<Meeting> meeting = *out = entry;
    if (meeting->failed) {
      Leave(key, *meeting);
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                        site + ": rank " + std::to_string(rank) + " came to the " + phase +
                            " when " + Ranks(meeting->here, true) + " of " +
                            std::to_string(ranks) + " had waited " +
                            std::to_string(limit.count()) +
                            " ms and given it up; every rank must make the same calls in the "
                            "same order, within that time (SYNCOPATE_MEETING_MS)");
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
          failed_.push_back(key);
          if (failed_.size() > kFailedMeetings) {
            open_.erase(failed_.front());
            failed_.pop_front();
          }
        }
        Leave(key, *meeting);
        return ffi::Error(
            ffi::ErrorCode::kDeadlineExceeded,
            site + ": " + Ranks(meeting->here, false) + " of " + std::to_string(ranks) +
                " did not come to the " + phase + " within " + std::to_string(limit.count()) +
                " ms (here: " + Ranks(meeting->here, true) +
                "); every rank must make the same calls in the same order, and all ranks must "
                "be devices of one process; if one is only late, set SYNCOPATE_MEETING_MS");
      }
    }
    Leave(key, *meeting);
    return ffi::Error::Success();
  }

 private:
  // The last rank to leave ends the meeting.
  void Leave(const Key& key, Meeting& meeting) {
    if (++meeting.left == meeting.cards.size()) open_.erase(key);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Meeting>> open_;
  std::deque<Key> failed_;  // the last ones
};

}  // namespace

#endif  // SYNCOPATE_JAX_NATIVE_MEETINGS_H_
