#pragma once

#include <array>
#include <string_view>
#include <utility>

#include "tile_ir/ir.h"

namespace deplo::tile_ir {

inline constexpr std::array kLoopKinds{
    std::pair{LoopKind::serial, std::string_view("serial")},    std::pair{LoopKind::parallel, std::string_view("parallel")},
    std::pair{LoopKind::lanes, std::string_view("lanes")},      std::pair{LoopKind::unroll, std::string_view("unroll")},
    std::pair{LoopKind::block_x, std::string_view("block_x")},  std::pair{LoopKind::block_y, std::string_view("block_y")},
    std::pair{LoopKind::block_z, std::string_view("block_z")},  std::pair{LoopKind::thread_x, std::string_view("thread_x")},
    std::pair{LoopKind::thread_y, std::string_view("thread_y")}};

inline constexpr std::array kSpaces{std::pair{Space::reg, std::string_view("register")}, std::pair{Space::stack, std::string_view("stack")},
                                    std::pair{Space::scratch, std::string_view("scratch")}, std::pair{Space::shared, std::string_view("shared")},
                                    std::pair{Space::matrix, std::string_view("matrix")}};

std::string_view to_string(LoopKind kind);
std::string_view to_string(Space space);

}  // namespace deplo::tile_ir
