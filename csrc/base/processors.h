#pragma once

#include <vector>

namespace deplo {

/// Processors that the calling thread may use: those of its affinity, or of all places (see below) where OpenMP bound it to the first of them.
int available_processors();

/// Tells the places, sets of the system's numbers of processors, that OpenMP binds its threads to. It bound the program's first thread to the first
/// place, and threads inherit that affinity from it: it says what OpenMP does, not what the process may use. A thread with any other affinity, one
/// that was narrowed on purpose in this process or in a forked child among them, keeps to that. None: OpenMP binds no thread.
void use_places(const std::vector<std::vector<int>>& places);

/// Lets the calling thread run on all available processors, as a thread inherits the affinity of the one that started it.
void use_available_processors();

}  // namespace deplo
