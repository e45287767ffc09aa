# find_package(deplo_runtime) gives deplo::runtime: the library that runs packages of deplo.export. It needs neither torch nor LLVM.
get_filename_component(DEPLO_RUNTIME_ROOT ${CMAKE_CURRENT_LIST_DIR} DIRECTORY)
if(NOT TARGET deplo::runtime)
  add_library(deplo::runtime SHARED IMPORTED)
  set_target_properties(deplo::runtime PROPERTIES IMPORTED_LOCATION ${DEPLO_RUNTIME_ROOT}/lib/libdeplo_runtime.so
    INTERFACE_INCLUDE_DIRECTORIES ${DEPLO_RUNTIME_ROOT}/include)
endif()
