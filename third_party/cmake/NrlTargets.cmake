# How every library and test of the project is made.

# Flags for our own code (third-party targets are SYSTEM and unaffected).
# -Wno-restrict: GCC 12 reports false overlaps inside std::string (GCC bug 105651).
add_library(nrl_flags INTERFACE)
target_include_directories(nrl_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(nrl_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wno-unknown-pragmas -Wno-restrict -fno-math-errno -fno-trapping-math>
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

# nrl_library(NAME SOURCES... LINK libs...): one floor.
function(nrl_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK;PRIVATE_LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC nrl_flags ${ARG_LINK} PRIVATE ${ARG_PRIVATE_LINK})
endfunction()

# Flags of CUDA sources (*.cu) of a library. -Wpedantic would complain about every line marker of nvcc.
function(nrl_cuda_flags name)
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Wno-deprecated-gpu-targets>)
endfunction()

# nrl_test(NAME SOURCES... LINK libs... [RANKS n...]): a Catch2 program; RANKS runs it under mpirun with n ranks.
function(nrl_test name)
  cmake_parse_arguments(ARG "NO_MAIN" "TIMEOUT" "SOURCES;LINK;RANKS" ${ARGN})
  if(NOT NRL_TESTS)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINK} nrl_flags)
  if(ARG_NO_MAIN)
    target_link_libraries(${name} PRIVATE nrl::catch2)
  else()
    target_link_libraries(${name} PRIVATE nrl::catch2_main)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(ARG_RANKS)
    foreach(n IN LISTS ARG_RANKS)
      add_test(NAME ${name}.n${n} COMMAND ${NRL_MPIRUN} -n ${n} $<TARGET_FILE:${name}>)
      set_tests_properties(${name}.n${n} PROPERTIES TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "${NRL_MPI_TEST_ENV}")
    endforeach()
  else()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  endif()
endfunction()
