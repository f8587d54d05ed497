# nvcc from PATH or /usr/local/cuda, else the toolkit that tools/fetch_deps.py laid out: found by the root file as TANDEM_NVCC.
set(CMAKE_CUDA_COMPILER ${TANDEM_NVCC} CACHE FILEPATH "")
# Code for this machine's GPU, for Hopper where there is none; the preset release has all.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE capabilities ERROR_QUIET)
  set(architecture 90a)
  if(capabilities MATCHES "^([0-9]+)\\.([0-9])" AND CMAKE_MATCH_1 GREATER_EQUAL 8 AND NOT CMAKE_MATCH_0 STREQUAL "9.0")
    set(architecture ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${architecture}-real CACHE STRING "as 80-real;90a-real;120-real")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)    # the one that LibTorch loads
enable_language(CUDA)
# CMake 3.25 knows no C++20 flag for nvcc and stops; tell it. After enable_language: before, its compiler check fails.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall;-Werror=default-stream-launch;--threads=1;-Xfatbin=-compress-all>")
