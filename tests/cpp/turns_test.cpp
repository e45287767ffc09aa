#include "runtime/turns.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "base/processors.h"

using namespace deplo::runtime;
using namespace std::chrono_literals;

namespace {

void begin(Turn& turn) {
  if (!turn.begin()) turn.wait();
}

/// Runs `fn(k)` on `count` threads.
void on_threads(int count, const std::function<void(int)>& fn) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(count));
  for (int k = 0; k < count; ++k) threads.emplace_back(fn, k);
  for (auto& thread : threads) thread.join();
}

/// The most programs that were under way at once while `count` threads each ran `rounds`. Those that waited for so long that they may have gone on
/// without a turn are left out.
int most_at_once(int count, int rounds) {
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  std::atomic<bool> inner_waits{false};
  on_threads(count, [&](int) {
    for (int round = 0; round < rounds; ++round) {
      const auto start = std::chrono::steady_clock::now();
      Turn outer;
      begin(outer);
      const int counts = std::chrono::steady_clock::now() - start < 20ms ? 1 : 0;
      Turn inner;  // of a program that a library call of the outer one calls
      if (!inner.begin()) inner_waits.store(true);
      const int seen = inside.fetch_add(counts) + counts;
      for (int before = most.load(); before < seen && !most.compare_exchange_weak(before, seen);) {
      }
      std::this_thread::sleep_for(50us);
      inside.fetch_sub(counts);
    }
  });
  CHECK(!inner_waits.load());
  return most.load();
}

}  // namespace

TEST_CASE("no more programs run at once than there are processors, nor than are useful") {
  const int processors = deplo::available_processors();
  CHECK(useful_callers() == processors);
  const int most = most_at_once(processors + 4, 20);
  CHECK((most > 0 && most <= processors));
  set_useful_callers(1);
  CHECK(most_at_once(processors + 2, 20) == 1);
  set_useful_callers(1000);
  CHECK(useful_callers() == processors);
}

TEST_CASE("every thread gets its turn while all call without a pause") {
  const int threads = deplo::available_processors() + 6;
  std::vector<std::atomic<int>> calls(static_cast<size_t>(threads));
  std::atomic<bool> over{false};
  std::atomic<int> waiting{threads};
  on_threads(threads, [&](int k) {
    while (!over.load()) {
      Turn turn;
      begin(turn);
      // Ends when all had ten turns' worth of calls; a thread that starves would keep the test from ending.
      if (calls[static_cast<size_t>(k)].fetch_add(1) == 10 && waiting.fetch_sub(1) == 1) over.store(true);
      std::this_thread::sleep_for(100us);
    }
  });
  for (auto& count : calls) CHECK(count.load() > 10);
}

TEST_CASE("who has a turn and stays away, or stays inside, keeps nobody waiting for ever") {
  const int processors = deplo::available_processors();
  std::atomic<int> ready{0};
  std::atomic<bool> done{false};
  on_threads(processors + 1, [&](int k) {
    if (k < processors) {
      Turn turn;
      begin(turn);
      ready.fetch_add(1);
      while (!done.load()) std::this_thread::sleep_for(1ms);  // as a program that waits for what the last thread does
      return;
    }
    while (ready.load() < processors) std::this_thread::sleep_for(1ms);
    Turn late;
    begin(late);
    done.store(true);
  });
  // Those threads are gone now, and their places with them.
  for (int k = 0; k < 3; ++k)
    on_threads(processors, [](int) {
      Turn turn;
      begin(turn);
    });
}

TEST_CASE("callers are counted while they are there") {
  std::this_thread::sleep_for(15ms);
  Turn mine;
  begin(mine);
  CHECK(callers() == 1);
  CHECK(!has_company());
  std::atomic<int> step{0};
  std::thread other([&] {
    Turn turn;
    begin(turn);
    CHECK(callers() == 2);
    step.store(1);
    while (step.load() == 1) std::this_thread::sleep_for(1ms);
  });
  while (step.load() == 0) std::this_thread::sleep_for(1ms);
  CHECK(has_company());
  step.store(2);
  other.join();
  std::this_thread::sleep_for(15ms);
  CHECK(callers() == 1);
  CHECK(!has_company());
}

TEST_CASE("a forked child has turns of its own") {
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over.load()) {
      Turn turn;
      begin(turn);
    }
  });
  int failed = 0;
  for (int round = 0; round < 8; ++round) {
    Turn outer;  // a fork from a library call
    begin(outer);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      on_threads(deplo::available_processors() + 2, [](int) {
        Turn turn;
        begin(turn);
      });
      _exit(useful_callers() == deplo::available_processors() ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) ++failed;
  }
  over.store(true);
  busy.join();
  CHECK(failed == 0);
}
