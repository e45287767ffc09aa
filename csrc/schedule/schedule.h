#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace deplo {

class Lexer;

// Schedules as data: where and when the iterations of one kernel's nest run. Heuristics propose one, options give one, applying it is
// mechanical; it decides speed, never results beyond the association of sums.
//
//   contraction parallel(b, n, i, work=65536) tile(i=96) tile(n=256) vectorize(n) register_block(i=6, n=16) tile(c.k=512) unroll(c.k=4)
//   pack(c.lanes, at=program) pack(c.rows, at=block, pad=16)
//
//   schedule  = kind { directive }                          line ends are spaces
//   directive = word "(" [ argument { "," argument } ] ")"
//   argument  = name { "*" name } [ "=" value ] | integer
//   value     = integer | name
//
// Names are axes of the kernel's canonical nest; i*j is a group of axes taken as one, row-major. The order of directives means nothing
// but for `phase`, which opens a part; that of arguments counts. Words:
//
//   parallel(a, b, ..., work=W)     the axes, or their tiles, that make up the parallel loop, the last one fastest; it is cut into pieces of at
//                                   least W operations
//   reorder(a, b, ...)              axes that run one after the other inside of the parallel loop, outer first
//   tile(a=T)                       the axis runs in tiles of T points; c.k is axis k of reduction c, whose sum is formed tile by tile
//   vectorize(a, by=U)              the axis gets the vector lanes, U vectors in flight (1 unless said); of inner loops and
//                                   reductions over axes of one name, nth=N is the N-th in the order of the text, from 0
//   register_block(a=R, b=C)        R x C sums are kept in registers
//   window(a=R)                     reductions over few neighbours of R points of the axis share their loads, taps unrolled; the interior of
//                                   an image, where no guard fails, is apart from its borders
//   partition(a, tail=T)            where a tile of any size ends, register blocks have T rows
//   unroll(a=U)                     the body is repeated U times
//   dot(a=2)                        bf16 operands are packed with two steps of a side by side, and multiplied by dot2
//   dot(a=32)                       so packed, and multiplied in a matrix unit
//   dot(a=32, parts=3)              float32 operands as sums of three bf16, so packed and multiplied
//   transpose(a=T)                  with lanes on another axis: tiles of T points of a, along which memory runs, are transposed in registers
//   pack(c.rows, at=L, pad=P)       the operand of reduction c that lies along its rows (or `lanes`) is copied into panels: at the program's
//                                   start (`program`) or for each tile (`block`), whose rows are then P elements longer than needed
//   share(a=S)                      of kind online: S rows of the axis share keys and values that are packed once, block by block
//   direct(rows=R)                  of kind online: keys and values are read where they lie, for R rows at a time
//   phase(N)                        of kind rows: what follows is about the N-th inner nest with a contraction, from 0
//   threads(T)                      threads of a GPU block; with rows, of each row, and with split, along the points
//   vectorize(by=V), (a, by=V)      of a GPU's threads: V elements side by side, of the row or of axis a
//   split(R), unroll(U)             R threads share the reductions of each of a GPU block's points; vectors of each of a GPU's threads
//   rows(R), keep(registers)        rows of a GPU block; a row stays in the registers of its threads
//   warps(i=R, j=C), stages(S)      R x C warps share a GPU block's tile; S tiles of k lie in its shared memory at once
//   split(S)                        of a product: S sets of its warps each add up a part of k
//   groups(i=G)                     G groups of four warps of a GPU's block multiply together, straight from shared memory
//   raster(R)                       a GPU's blocks go down R rows of tiles before the next column of tiles
//   stage(v, ...)                   what these loads reach from a GPU block's tile is copied to its shared memory
//   blocks(B)                       blocks of a GPU's grid, at most; each then goes on with further points or rows
//   order(a, b, ...), last(a)       stores may meet along axes: a GPU's thread runs through them in order, or stores if it is a place's last one
//
// Kinds, each with the words it takes:
//   contraction   parallel tile vectorize register_block partition chain unroll dot pack epilogue
//   rows          parallel tile vectorize, and phases, which take what contractions take but parallel and the tile of the rows
//   online        parallel share dot, the tiles of rows and keys, and two register blocks: rows by keys, and rows by columns of the values; or
//                 parallel direct dot, the tile of keys, and vectorize, of columns of the values
//   nest          parallel reorder tile transpose vectorize register_block window; every kernel has schedules of this kind
//   pack          parallel tile; follows from the kernel that it packs for
//   gpu_contraction, gpu_matrix         tile register_block threads; tile warps split stages raster
//   gpu_online                          tile warps stages, or tile groups stages, or tile register_block threads stages
//   gpu_chain                           tile warps stages keep
//   gpu_tiles, gpu_groups; gpu_taps     tile stages raster; tile warps
//   gpu_points                          threads blocks order, or threads vectorize split unroll last
//   gpu_stencil; gpu_stencils           tile vectorize register_block stage; tile threads vectorize register_block
//   gpu_transpose                       tile threads vectorize
//   gpu_rows                            threads blocks, or threads vectorize rows keep
//   gpu_serial                          threads

struct Argument {
  std::string name;                                          ///< an axis, a group i*j, an operand or a key; empty for a bare integer
  std::variant<std::monostate, int64_t, std::string> value;  ///< of name=value, or the bare integer
  bool operator==(const Argument&) const = default;
};

struct Directive {
  std::string word;
  std::vector<Argument> arguments;
  bool operator==(const Directive&) const = default;
};

struct Schedule {
  std::string kind;
  std::vector<Directive> directives;
  bool operator==(const Schedule&) const = default;
};

std::string print(const Argument& argument);
std::string print(const Directive& directive);
std::string print(const Schedule& schedule);
/// Throws UserError `source:line:column: ...` where the text is no schedule.
Schedule parse_schedule(const std::string& text, const std::string& source = "<schedule>");
/// Reads one from the lexer of a longer text: to the end of the line, or of all.
Schedule parse_schedule(Lexer& lexer);
/// Equal schedules have equal hashes, on every machine.
uint64_t hash(const Schedule& schedule);

/// Schedules by kernel name from text as IR dumps show them, `schedule @k0: ...` any number of times; without a first `schedule @`, the
/// text is one schedule, under the name "".
std::map<std::string, Schedule> parse_schedules(const std::string& text, const std::string& source = "<schedule>");

}  // namespace deplo
