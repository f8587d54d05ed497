include(GoogleTest)

# tandem_test(NAME SOURCES file... LIBS target... [LABELS unit|system|learn|gpu] [TIMEOUT seconds] [DATA file...])
# One binary is one CTest test: starting a process costs more than most cases take.
function(tandem_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gtest_main GTest::gmock)
  target_compile_definitions(${name} PRIVATE TANDEM_GOLDEN_DIR="${CMAKE_SOURCE_DIR}/tests/golden")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "OMP_NUM_THREADS=1;OMP_WAIT_POLICY=PASSIVE")
  if("gpu" IN_LIST arg_LABELS)
    set_tests_properties(${name} PROPERTIES RESOURCE_LOCK gpu)    # one at a time: some take all of its memory
  endif()
endfunction()
