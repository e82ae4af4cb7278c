# nrl_sanitize(TARGET address|thread|plain): one program with a sanitizer in an ordinary build; the presets asan and tsan
# instrument the whole tree.
function(nrl_sanitize target build)
  set(address -fsanitize=address,undefined -fno-sanitize-recover=all)
  set(thread -fsanitize=thread)
  set(plain "")
  # -w: GCC gives false warnings in instrumented code, and the plain build gives the true ones.
  target_compile_options(${target} PRIVATE -O1 -g1 -fno-omit-frame-pointer -w ${${build}})
  target_link_options(${target} PRIVATE ${${build}})
endfunction()
