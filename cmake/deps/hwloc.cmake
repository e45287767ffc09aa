# Headers only: the library is opened at run time (base/topology.cpp), so that the extension works where there is none.
find_path(HWLOC_INCLUDE_DIR hwloc.h REQUIRED)
add_library(deplo_hwloc INTERFACE)
target_include_directories(deplo_hwloc SYSTEM INTERFACE ${HWLOC_INCLUDE_DIR})
target_link_libraries(deplo_hwloc INTERFACE ${CMAKE_DL_LIBS})
