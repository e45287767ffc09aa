# Headers and libraries of the torch that the chosen Python imports; found without torch's own CMake files, which look for CUDA.
find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python3_EXECUTABLE} -c "import torch, os; print(os.path.dirname(torch.__file__))"
                OUTPUT_VARIABLE TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE TORCH_FAILED)
if(TORCH_FAILED)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has no torch: install it (make venv) or pass -DDEPLO_PYTHON=OFF")
endif()
add_library(deplo_torch INTERFACE)
target_include_directories(deplo_torch SYSTEM INTERFACE ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include ${Python3_INCLUDE_DIRS})
target_link_directories(deplo_torch INTERFACE ${TORCH_ROOT}/lib)
target_link_libraries(deplo_torch INTERFACE torch_python torch torch_cpu c10)
# Its folder holds headers of an fmt, too, of another version than the one that deplo_fmt compiled: they stay headers alone.
target_compile_definitions(deplo_torch INTERFACE TORCH_API_INCLUDE_EXTENSION_H FMT_HEADER_ONLY=1)
