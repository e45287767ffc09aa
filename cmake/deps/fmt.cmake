# Header-only, so that the extension carries no libfmt.
find_package(fmt 9 REQUIRED)
add_library(deplo_fmt INTERFACE)
target_link_libraries(deplo_fmt INTERFACE fmt::fmt-header-only)
