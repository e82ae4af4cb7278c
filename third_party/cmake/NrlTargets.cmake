# How every library and test of the project is made.

# Flags for our own code (third-party targets are SYSTEM and unaffected).
# GCC 12 and 14 report false overlaps and bounds inside std::string (GCC bug 105651), most of them at -O1 and with
# precompiled headers: no -Wrestrict, -Warray-bounds, -Wstringop-*.
set(NRL_FALSE_WARNINGS -Wno-restrict -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
add_library(nrl_flags INTERFACE)
target_include_directories(nrl_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(nrl_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wno-unknown-pragmas ${NRL_FALSE_WARNINGS} -fno-math-errno -fno-trapping-math>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas>)
if(NRL_WERROR)
  target_compile_options(nrl_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(NRL_SANITIZE)
  # -Wno-maybe-uninitialized: GCC reports false ones in instrumented code (its manual says so of -fsanitize).
  target_compile_options(nrl_flags INTERFACE -fsanitize=${NRL_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    -Wno-maybe-uninitialized)
  target_link_options(nrl_flags INTERFACE -fsanitize=${NRL_SANITIZE})
else()
  target_compile_options(nrl_flags INTERFACE $<$<CONFIG:Release>:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2> -fstack-protector-strong)
  target_link_options(nrl_flags INTERFACE -Wl,-z,relro,-z,now)
endif()

# Paths in messages and debug information begin at the source directory. Not by default: ccache would find nothing that
# another directory has compiled.
if(NRL_REPRODUCIBLE)
  target_compile_options(nrl_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX,C>:-ffile-prefix-map=${CMAKE_BINARY_DIR}=build -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.>)
endif()

# OpenMP everywhere, because a precompiled header serves only targets with the same flags.
target_link_libraries(nrl_flags INTERFACE nrl::openmp)

# For code that is not worth the time that more than -O1 takes to compile. At -O1 GCC 14 reports uninitialized parts of
# std::variant, falsely.
set(NRL_COLD_OPTIONS $<$<NOT:$<CONFIG:Debug>>:-O1> -Wno-maybe-uninitialized)
# For tests: compiles in two thirds of the time of -O1.
set(NRL_TEST_OPTIONS $<$<NOT:$<CONFIG:Debug>>:-Og> -Wno-maybe-uninitialized)

# The headers that most files include, precompiled for libraries, for cold ones, and, with Catch2, for tests: GCC takes
# none with another optimization. A file must still include what it uses: NRL_PCH=OFF builds without.
set(NRL_PCH_HEADERS <algorithm> <array> <atomic> <chrono> <cstdint> <cstring> <functional> <map> <memory> <mutex>
  <numeric> <optional> <set> <span> <sstream> <string> <string_view> <thread> <unordered_map> <utility> <vector>
  <spdlog/fmt/fmt.h>)
function(nrl_precompile name)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/${name}.cpp CONTENT "")
  add_library(${name} OBJECT ${CMAKE_BINARY_DIR}/${name}.cpp)
  target_link_libraries(${name} PRIVATE nrl_flags nrl::spdlog)
  target_precompile_headers(${name} PRIVATE ${NRL_PCH_HEADERS} ${ARGN})
endfunction()
if(NRL_PCH)
  nrl_precompile(nrl_pch)
  nrl_precompile(nrl_cold_pch)
  target_compile_options(nrl_cold_pch PRIVATE ${NRL_COLD_OPTIONS})
  if(NRL_TESTS)
    nrl_precompile(nrl_test_pch <tests/catch.h>)
    target_link_libraries(nrl_test_pch PRIVATE nrl::catch2)
    set_target_properties(nrl_test_pch PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(nrl_test_pch PRIVATE ${NRL_TEST_OPTIONS} -fPIE)  # as programs are
  endif()
endif()

function(nrl_use_pch target pch)
  if(NRL_PCH)
    target_precompile_headers(${target} REUSE_FROM ${pch})
  endif()
endfunction()

# nrl_unity(TARGET): compiles several files of the target at a time, which takes less than half as long because they
# share the instances of templates. Names in anonymous namespaces must be unique within a target. Files with options of
# their own or SKIP_UNITY_BUILD_INCLUSION, set before, are compiled alone. Not CMake's UNITY_BUILD: its files hold absolute paths, with which ccache
# finds nothing that another build directory has compiled.
function(nrl_unity target)
  if(NOT NRL_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  set(alone "")
  set(together "")
  foreach(source IN LISTS sources)
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    get_source_file_property(definitions ${source} COMPILE_DEFINITIONS)
    get_source_file_property(skip ${source} SKIP_UNITY_BUILD_INCLUSION)
    if(source MATCHES "\\.cpp$" AND NOT IS_ABSOLUTE ${source} AND NOT (options OR definitions OR skip))
      list(APPEND together ${source})
    else()
      list(APPEND alone ${source})
    endif()
  endforeach()
  set(index 0)
  while(together)
    list(SUBLIST together 0 12 batch)
    list(REMOVE_ITEM together ${batch})
    set(content "")
    foreach(source IN LISTS batch)
      cmake_path(ABSOLUTE_PATH source NORMALIZE OUTPUT_VARIABLE path)
      cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${CMAKE_SOURCE_DIR})
      string(APPEND content "#include \"${path}\"\n")
    endforeach()
    set(unit ${CMAKE_CURRENT_BINARY_DIR}/unity/${target}_${index}.cpp)
    file(CONFIGURE OUTPUT ${unit} CONTENT "${content}")
    list(APPEND alone ${unit})
    math(EXPR index "${index} + 1")
  endwhile()
  set_target_properties(${target} PROPERTIES SOURCES "${alone}")
  # GCC takes types of anonymous namespaces in included files for an error in a header.
  target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
endfunction()

# nrl_cold(TARGET): compiled with NRL_COLD_OPTIONS.
function(nrl_cold target)
  target_compile_options(${target} PRIVATE ${NRL_COLD_OPTIONS})
  nrl_use_pch(${target} nrl_cold_pch)
endfunction()

# nrl_library(NAME SOURCES... LINK libs... [COLD] [NO_PCH]): one floor. COLD: as nrl_cold. NO_PCH: it has other flags,
# and its files are compiled one at a time.
function(nrl_library name)
  cmake_parse_arguments(ARG "COLD;NO_PCH" "" "SOURCES;LINK;PRIVATE_LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC nrl_flags ${ARG_LINK} PRIVATE ${ARG_PRIVATE_LINK})
  if(ARG_COLD)
    nrl_cold(${name})
  elseif(NOT ARG_NO_PCH)
    nrl_use_pch(${name} nrl_pch)
  endif()
  if(NOT ARG_NO_PCH)
    nrl_unity(${name})
  endif()
endfunction()

# Flags of CUDA sources (*.cu) of a library. -Wpedantic would complain about every line marker of nvcc.
function(nrl_cuda_flags name)
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Wno-deprecated-gpu-targets>)
endfunction()

# The fast half of the suite: unit tests, and what calls nrl_fast_test(TEST TARGET). The target fast_tests builds it,
# `ctest -L fast` runs it; CI does both under the address sanitizer.
if(NRL_TESTS)
  add_custom_target(fast_tests)
endif()
function(nrl_fast_test test target)
  set_property(TEST ${test} APPEND PROPERTY LABELS fast)
  add_dependencies(fast_tests ${target})
endfunction()

# nrl_test(NAME SOURCES... LINK libs... [RANKS n...] [UNITY]): a Catch2 program; RANKS runs it under mpirun with n ranks
# (tests/comm/world_fixture.h); UNITY: as nrl_unity.
function(nrl_test name)
  cmake_parse_arguments(ARG "UNITY" "TIMEOUT" "SOURCES;LINK;RANKS" ${ARGN})
  if(NOT NRL_TESTS)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINK} nrl_flags)
  target_compile_options(${name} PRIVATE ${NRL_TEST_OPTIONS})
  nrl_use_pch(${name} nrl_test_pch)
  if(ARG_UNITY)
    nrl_unity(${name})
  endif()
  if(ARG_RANKS)
    target_link_libraries(${name} PRIVATE nrl_mpi_main nrl_mpi_backends)
  else()
    target_link_libraries(${name} PRIVATE nrl::catch2_main)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
    if(NRL_SANITIZE)
      set(ARG_TIMEOUT 1200)
    endif()
  endif()
  if(ARG_RANKS)
    foreach(n IN LISTS ARG_RANKS)
      add_test(NAME ${name}.n${n} COMMAND ${NRL_MPIRUN} -n ${n} $<TARGET_FILE:${name}>)
      # mpirun fails if another one of the same user removes their common directory while it starts (Open MPI 4).
      set_tests_properties(${name}.n${n} PROPERTIES TIMEOUT ${ARG_TIMEOUT}
        ENVIRONMENT "${NRL_MPI_TEST_ENV};OMPI_MCA_orte_tmpdir_base=${CMAKE_BINARY_DIR}/mpi/${name}.n${n}")
      if(n EQUAL 2)
        nrl_fast_test(${name}.n${n} ${name})
      endif()
    endforeach()
  else()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
    nrl_fast_test(${name} ${name})
  endif()
endfunction()
