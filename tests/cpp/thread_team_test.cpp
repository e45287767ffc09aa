#include "runtime/thread_team.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <thread>
#include <vector>

#include "base/processors.h"
#include "runtime/turns.h"

using namespace deplo::runtime;

namespace {

struct Counts {
  std::vector<std::atomic<int>> runs;
  std::atomic<int> max_worker{0};
};

void count(void* context, int64_t part, int worker) {
  auto& counts = *static_cast<Counts*>(context);
  counts.runs[static_cast<size_t>(part)].fetch_add(1);
  int seen = counts.max_worker.load();
  while (seen < worker && !counts.max_worker.compare_exchange_weak(seen, worker)) {
  }
}

/// Whether every part ran once, on workers below `threads`.
bool runs_once(TeamLease& team, int64_t parts, int threads) {
  Counts counts{std::vector<std::atomic<int>>(static_cast<size_t>(parts)), {}};
  team.run(parts, count, &counts);
  for (auto& runs : counts.runs)
    if (runs.load() != 1) return false;
  return counts.max_worker.load() < threads;
}

}  // namespace

TEST_CASE("workers leave signals to the host's threads, but those of faults") {
  struct Masks {
    std::array<sigset_t, 2> of_worker{};
    std::atomic<int> seen{0};
  } masks;
  TeamLease team(2);
  team.run(
      2,
      [](void* context, int64_t, int worker) {
        auto& all = *static_cast<Masks*>(context);
        pthread_sigmask(SIG_SETMASK, nullptr, &all.of_worker[static_cast<size_t>(worker)]);
        all.seen.fetch_or(1 << worker);
        for (int turn = 0; turn < 100000 && all.seen.load() != 3; ++turn) std::this_thread::yield();  // each worker gets a part
      },
      &masks);
  for (int worker = 0; worker < 2; ++worker)
    if ((masks.seen.load() >> worker & 1) != 0)
      for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) CHECK(sigismember(&masks.of_worker[static_cast<size_t>(worker)], fault) == 0);
  if ((masks.seen.load() & 2) != 0) CHECK(sigismember(&masks.of_worker[1], SIGINT) == 1);
}

TEST_CASE("a team runs every part once") {
  for (int threads : {1, 2, 3, 8}) {
    TeamLease team(threads);
    REQUIRE(team.threads() == threads);
    for (int64_t parts : {0, 1, 2, 7, 64, 1000}) REQUIRE(runs_once(team, parts, threads));
  }
}

TEST_CASE("jobs follow each other while workers spin and after they parked") {
  TeamLease team(3);
  for (int round = 0; round < 2000; ++round) REQUIRE(runs_once(team, 5, 3));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  REQUIRE(runs_once(team, 5, 3));
}

TEST_CASE("who finds the team busy works alone") {
  TeamLease first(2);
  TeamLease second(2);
  CHECK(second.threads() == 1);
  CHECK(runs_once(second, 10, 1));
  CHECK(runs_once(first, 10, 2));
}

TEST_CASE("several callers at once") {
  std::vector<std::thread> callers;
  std::atomic<int> failures{0};
  for (int t = 0; t < 4; ++t)
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        TeamLease team(2);
        if (!runs_once(team, 8, 2)) failures.fetch_add(1);
      }
    });
  for (auto& caller : callers) caller.join();
  CHECK(failures.load() == 0);
}

TEST_CASE("a team's worker may use all places while its caller is bound to the first, and no more than its caller otherwise") {
  cpu_set_t all;
  REQUIRE(sched_getaffinity(0, sizeof(all), &all) == 0);
  std::vector<std::vector<int>> places;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor)
    if (CPU_ISSET(static_cast<size_t>(processor), &all)) places.push_back({processor});
  auto seen_when_bound_to = [&](int processor) {
    // A forked child: it has no team yet, and its affinity is its own.
    const pid_t child = fork();
    if (child == 0) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(static_cast<size_t>(processor), &one);
      sched_setaffinity(0, sizeof(one), &one);
      const int told = deplo::available_processors();
      TeamLease team(2);
      std::atomic<int> workers{0};
      auto count_processors = [](void* context, int64_t, int worker) {
        cpu_set_t set;
        sched_getaffinity(0, sizeof(set), &set);
        auto& seen = *static_cast<std::atomic<int>*>(context);
        if (worker == 1) seen.store(CPU_COUNT(&set));
        while (seen.load() == 0) sched_yield();
      };
      team.run(2, count_processors, &workers);
      _exit(workers.load() == told ? told : 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  deplo::use_places(places);
  const int first = seen_when_bound_to(places.front().front());
  const int other = seen_when_bound_to(places.back().front());
  deplo::use_places({});
  const int unbound = seen_when_bound_to(places.front().front());
  CHECK(first == CPU_COUNT(&all));
  if (places.size() > 1) CHECK(other == 1);
  CHECK(unbound == 1);
}

TEST_CASE("a forked child makes workers of its own") {
  TeamLease parent(2);
  REQUIRE(runs_once(parent, 16, 2));
  pid_t child = fork();
  if (child == 0) {
    TeamLease team(2);
    _exit(team.threads() == 2 && runs_once(team, 16, 2) ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(runs_once(parent, 16, 2));
}

namespace {

std::atomic<int> host_jobs{0};

void host_pool(void (*fn)(void*), void* data, unsigned threads, unsigned /*flags*/) {
  host_jobs.fetch_add(1);
  std::vector<std::thread> helpers;
  for (unsigned t = 1; t < threads; ++t) helpers.emplace_back([&] { fn(data); });
  fn(data);
  for (auto& helper : helpers) helper.join();
}

constexpr std::chrono::nanoseconds kAnyTime = std::chrono::hours(1);

/// Its second thread comes when all is done.
void late_pool(void (*fn)(void*), void* data, unsigned /*threads*/, unsigned /*flags*/) {
  host_jobs.fetch_add(1);
  fn(data);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  fn(data);
}

/// As OpenMP does where no threads are left.
void lonely_pool(void (*fn)(void*), void* data, unsigned /*threads*/, unsigned /*flags*/) { fn(data); }

}  // namespace

TEST_CASE("jobs run on the host's pool, and on workers of its own in a forked child") {
  host_jobs = 0;
  use_host_pool(host_pool, kAnyTime);
  {
    TeamLease first(3);
    for (int64_t parts : {2, 7, 500}) CHECK(runs_once(first, parts, 3));
    CHECK(host_jobs.load() == 3);
    CHECK(runs_once(first, 1, 1));
    CHECK(host_jobs.load() == 3);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(15));  // nobody else has called of late
  {
    Turn mine;
    REQUIRE(mine.begin());
    TeamLease first(2);
    CHECK(first.threads() == 2);
    std::thread([&] {
      Turn another;
      if (!another.begin()) another.wait();  // where there is one processor
      TeamLease second(2);                   // both work alone while both are there
      CHECK(second.threads() == 1);
      CHECK(runs_once(second, 9, 1));
      CHECK(runs_once(first, 9, 1));
      CHECK(host_jobs.load() == 3);
    }).join();
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    CHECK(runs_once(first, 9, 2));
    CHECK(host_jobs.load() == 4);
  }
  pid_t child = fork();
  if (child == 0) {
    TeamLease team(2);
    _exit(runs_once(team, 16, 2) && host_jobs.load() == 4 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  use_host_pool(lonely_pool, kAnyTime);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // callers came in turns a moment ago
  {
    TeamLease team(4);
    CHECK(team.threads() == 4);
    CHECK(runs_once(team, 100, 4));
  }
  use_host_pool(nullptr);
}

TEST_CASE("deplo's own workers take over while those of the host come late") {
  host_jobs = 0;
  use_host_pool(late_pool, std::chrono::milliseconds(1), kAnyTime);
  {
    TeamLease team(2);
    CHECK(runs_once(team, 100, 2));
    CHECK(host_jobs.load() == 1);
  }
  {
    TeamLease team(2);
    CHECK(runs_once(team, 100, 2));
    CHECK(host_jobs.load() == 1);
  }
  use_host_pool(late_pool, std::chrono::milliseconds(1), std::chrono::nanoseconds(0), kAnyTime);  // no pause yet
  for (int jobs : {2, 3}) {
    TeamLease team(2);
    CHECK(runs_once(team, 100, 2));
    CHECK(host_jobs.load() == jobs);
  }
  use_host_pool(host_pool, std::chrono::milliseconds(50), kAnyTime);  // the last part takes long, and nobody is late for it
  const int before = host_jobs.load();
  for (int jobs : {1, 2}) {
    TeamLease team(2);
    team.run(2, [](void*, int64_t part, int) { std::this_thread::sleep_for(std::chrono::milliseconds(part == 0 ? 0 : 200)); }, nullptr);
    CHECK(host_jobs.load() == before + jobs);
  }
  host_jobs = before;
  use_host_pool(late_pool, kAnyTime);  // patience, and nothing remembered
  {
    TeamLease team(2);
    CHECK(runs_once(team, 100, 2));
    CHECK(host_jobs.load() == 4);
  }
  use_host_pool(nullptr);
}
