# nvcc from PATH or /usr/local/cuda, else the toolkit that tools/fetch_deps.py laid out: found by the root file as TANDEM_NVCC.
set(CMAKE_CUDA_COMPILER ${TANDEM_NVCC} CACHE FILEPATH "")
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real CACHE STRING "add 80-real;120-real for other cards")
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
