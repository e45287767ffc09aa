#pragma once

#include <string>

namespace deplo {

/// Helpers of products of tiles, behind those of `prelude.h`: flags (mbarrier), copies of tiles by tensor maps (TMA), and products by groups of 128
/// threads (wgmma), of sm_90a.
const std::string& cuda_tile_prelude();

}  // namespace deplo
