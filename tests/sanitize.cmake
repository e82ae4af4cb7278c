# nrl_sanitize(TARGET address|thread|plain): one program with a sanitizer in an ordinary build; the presets asan and tsan
# instrument the whole tree.
function(nrl_sanitize target build)
  # Not all checks of undefined behaviour, which take long to compile: the preset asan has them.
  # Checks of addresses by calls take a third less time to compile than inline ones.
  set(address -fsanitize=address,alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow
    -fno-sanitize-recover=all --param=asan-instrumentation-with-call-threshold=0)
  set(thread -fsanitize=thread)
  set(plain "")
  # -w: GCC gives false warnings in instrumented code, and the plain build gives the true ones.
  target_compile_options(${target} PRIVATE -O1 -g1 -fno-omit-frame-pointer -w ${${build}})
  target_link_options(${target} PRIVATE ${${build}})
endfunction()
