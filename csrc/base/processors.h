#pragma once

namespace deplo {

/// Processors that this process may use: the calling thread's affinity, and what was added.
int available_processors();

/// Adds those of the calling thread. OpenMP may have bound each of its threads, the program's first one among them, to a processor of its own: then
/// no thread's affinity alone says what the process may use.
void add_processors_of_thread();

/// Lets the calling thread run on all of them, as a thread inherits the affinity of the one that started it.
void use_available_processors();

}  // namespace deplo
