# Linked into the extension, so that it carries no libfmt.so. Debian has no static libfmt, and as headers alone every file that formats
# compiles all of it anew (a third of a build); so fmt_once.cpp compiles it once, where this fmt's version agrees with it.
find_package(fmt 9 REQUIRED)
get_target_property(DEPLO_FMT_INCLUDE fmt::fmt-header-only INTERFACE_INCLUDE_DIRECTORIES)
try_compile(DEPLO_FMT_ONCE ${CMAKE_BINARY_DIR}/fmt_once SOURCES ${CMAKE_CURRENT_LIST_DIR}/fmt_once.cpp ${CMAKE_CURRENT_LIST_DIR}/fmt_once_check.cpp
            CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${DEPLO_FMT_INCLUDE} CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
if(DEPLO_FMT_ONCE)
  add_library(deplo_fmt STATIC ${CMAKE_CURRENT_LIST_DIR}/fmt_once.cpp)
  target_include_directories(deplo_fmt SYSTEM PUBLIC ${DEPLO_FMT_INCLUDE})
else()
  add_library(deplo_fmt INTERFACE)
  target_link_libraries(deplo_fmt INTERFACE fmt::fmt-header-only)
endif()
