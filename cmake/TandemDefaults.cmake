set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)   # -fPIC everywhere: no COPY relocations of LibTorch's vtables
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
# Line tables only: full -g doubles the objects of LibTorch files.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O2 -lineinfo -DNDEBUG")

# Where deploy/install_dependencies.sh puts it.
if(DEFINED ENV{TANDEM_CACHE})
  set(tandem_cache "$ENV{TANDEM_CACHE}")
else()
  set(tandem_cache "$ENV{HOME}/.cache/tandem")
endif()
set(TANDEM_DEPS "${tandem_cache}/deps" CACHE PATH "Folder laid out by tools/fetch_deps.py")

find_program(TANDEM_CCACHE ccache)
if(TANDEM_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TANDEM_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${TANDEM_CCACHE})
endif()
find_program(TANDEM_MOLD mold)
option(TANDEM_USE_MOLD "Link with mold" ON)
if(TANDEM_USE_MOLD AND TANDEM_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

# LibTorch brings gcc's OpenMP library, and a second one must not join it: for clang, OpenMP loops of our own are plain loops.
if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fopenmp=libgomp>)
endif()

# What is told of a source, as where --help says whose flags are whose, is its path in the project.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=>)

# The project's own targets link this; third-party code does not.
add_library(tandem_warnings INTERFACE)
target_compile_options(tandem_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wold-style-cast;-Wconversion;-Wno-sign-conversion>)
target_include_directories(tandem_warnings INTERFACE ${CMAKE_SOURCE_DIR})
