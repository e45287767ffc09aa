#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// What the emulator watches while it runs text that was compiled with -fsanitize=kernel-address, whose calls at every access it answers: races on
// shared memory, reads of shared memory that nobody wrote, and counts of what warps ask of memory.

namespace deplo_judge {

struct Counts {
  uint64_t global_bytes = 0, global_sectors = 0, global_requests = 0;
  uint64_t shared_requests = 0, shared_ways = 0;
  uint64_t races = 0, unwritten = 0;
};

/// Starts to watch a launch whose blocks have so many threads and bytes of dynamic shared memory; nothing is watched unless `judged`.
void start(bool judged, unsigned threads, unsigned shared_bytes);
void start_block();
/// Between accesses: who makes the next ones, and where its stack lies.
void set_thread(unsigned number, const void* stack, std::size_t bytes);
/// A thread starts a copy of so many bytes to 16 of shared memory, waits for it, and names a row of 16 bytes that its warp reads; `text`: where.
void copy(const void* to, const void* from, std::size_t bytes, const void* text);
void copied(const void* to);
void read_row(const void* row, const void* text);
/// A thread starts a copy to a tile of shared memory, which raises `flag` once it has taken place.
void copy_tile(const void* tile, std::size_t bytes);
void line_copied(const void* from, std::size_t bytes);  ///< of its memory, up to 128 bytes
void tile_copied(const void* tile, std::size_t bytes, unsigned by, const void* flag);
/// A thread's warp reads 16 bytes for a product that may still be under way, until it has waited for that.
void read_chunk(const void* chunk);
void chunk_was_read(const void* chunk);
/// A thread arrives at a flag; enough have; a thread goes on since they have.
void arrive(const void* flag, unsigned number);
void raise(const void* flag);
void pass(const void* flag, unsigned number);
/// A thread goes on behind a barrier.
void pass_barrier(unsigned number);
void end_block();
/// Ends the watch: what was found, with the first race or unwritten read in words.
Counts end(std::string& first);

}  // namespace deplo_judge
