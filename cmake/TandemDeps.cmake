find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)             # before anything of LibTorch; never put torch in CMAKE_PREFIX_PATH
if(NOT Protobuf_VERSION VERSION_EQUAL 3.21.12)
  message(FATAL_ERROR "Protobuf ${Protobuf_VERSION} found; Debian 12's 3.21.12 is wanted")
endif()
find_package(gRPC CONFIG REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(SQLite3 REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(Boost 1.74 REQUIRED)           # headers alone: Asio and Beast
find_package(ICU REQUIRED COMPONENTS uc)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
find_package(nlohmann_json REQUIRED)
find_package(GTest REQUIRED)

# LibTorch: own target, no TorchConfig. include/google is left out by fetch_deps.py (protobuf 3.13 would shadow 3.21).
set(torch_root ${TANDEM_DEPS}/torch)
if(NOT EXISTS ${torch_root}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "No LibTorch in '${TANDEM_DEPS}': run deploy/install_dependencies.sh")
endif()
if(TANDEM_CUDA AND NOT EXISTS ${torch_root}/lib/libtorch_cuda.so)
  message(FATAL_ERROR "No CUDA LibTorch in '${TANDEM_DEPS}': run deploy/install_dependencies.sh --cuda, or pass -DTANDEM_CUDA=OFF")
endif()
if(EXISTS ${torch_root}/include/google)
  message(FATAL_ERROR "${torch_root}/include/google shadows Debian's protobuf: remove it")
endif()
add_library(tandem_torch_sdk INTERFACE)
add_library(tandem::torch ALIAS tandem_torch_sdk)
target_include_directories(tandem_torch_sdk SYSTEM INTERFACE ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
set(torch_libs ${torch_root}/lib/libtorch_cpu.so ${torch_root}/lib/libc10.so)
if(TANDEM_CUDA)
  list(PREPEND torch_libs ${torch_root}/lib/libtorch.so ${torch_root}/lib/libtorch_cuda.so)
  list(APPEND torch_libs ${torch_root}/lib/libc10_cuda.so)
  target_compile_definitions(tandem_torch_sdk INTERFACE USE_C10D_NCCL USE_DISTRIBUTED)
  target_link_libraries(tandem_torch_sdk INTERFACE CUDA::cudart)
endif()
target_link_options(tandem_torch_sdk INTERFACE -Wl,--allow-shlib-undefined)
# libstdc++ first: libtorch.so exports parts of another libstdc++ (std::filesystem::remove_all jumps to address 0 there), and the
# loader takes the first library that has a symbol.
# libtorch_cuda registers itself by static initialisers: keep it though no symbol of it may be named.
target_link_libraries(tandem_torch_sdk INTERFACE -Wl,--no-as-needed -lstdc++ ${torch_libs} -Wl,--as-needed Threads::Threads)
set(CMAKE_BUILD_RPATH ${torch_root}/lib)    # torch's own RPATH finds ../../nvidia/*/lib from there

# Chat templates: llama.cpp's Jinja engine (MIT), compiled where fetch_deps.py laid it out. C++17 code of others: none of our warnings.
set(jinja_root ${TANDEM_DEPS}/llama_jinja)
if(NOT EXISTS ${jinja_root}/common/jinja/runtime.cpp)
  message(FATAL_ERROR "No llama_jinja in '${TANDEM_DEPS}': run deploy/install_dependencies.sh")
endif()
add_library(tandem_jinja STATIC
  ${jinja_root}/common/jinja/caps.cpp
  ${jinja_root}/common/jinja/lexer.cpp
  ${jinja_root}/common/jinja/parser.cpp
  ${jinja_root}/common/jinja/runtime.cpp
  ${jinja_root}/common/jinja/string.cpp
  ${jinja_root}/common/jinja/value.cpp
  ${jinja_root}/common/json.cpp
  ${jinja_root}/common/unicode.cpp
  ${CMAKE_CURRENT_LIST_DIR}/jinja/ggml_abort.cc)
add_library(tandem::jinja ALIAS tandem_jinja)
set_target_properties(tandem_jinja PROPERTIES CXX_STANDARD 17 CXX_CLANG_TIDY "")
target_compile_options(tandem_jinja PRIVATE -w)
target_include_directories(tandem_jinja SYSTEM PUBLIC ${jinja_root}/common PRIVATE ${jinja_root}/vendor ${jinja_root}/ggml/include)

if(TANDEM_CUDA)
  set(fi ${TANDEM_DEPS}/flashinfer/data)
  add_library(tandem_flashinfer INTERFACE)
  add_library(tandem::flashinfer ALIAS tandem_flashinfer)
  # FlashInfer's own CCCL (3.3) must precede the toolkit's (3.0): nvcc searches a user's -isystem before its include/cccl.
  target_include_directories(tandem_flashinfer SYSTEM INTERFACE ${fi}/cccl/libcudacxx/include ${fi}/cccl/cub
    ${fi}/cccl/thrust ${fi}/include ${fi}/cutlass/include)

  # Headers alone: libcudnn.so.9 is loaded at run time from beside LibTorch, which needs it too.
  find_path(TANDEM_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${TANDEM_DEPS}/nvidia/cudnn/include REQUIRED)
  add_library(tandem_cudnn_frontend INTERFACE)
  add_library(tandem::cudnn_frontend ALIAS tandem_cudnn_frontend)
  target_include_directories(tandem_cudnn_frontend SYSTEM INTERFACE ${TANDEM_DEPS}/include ${TANDEM_CUDNN_INCLUDE})
  target_compile_definitions(tandem_cudnn_frontend INTERFACE NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING)
  target_link_libraries(tandem_cudnn_frontend INTERFACE ${CMAKE_DL_LIBS})
endif()
