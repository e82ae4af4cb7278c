# Fails when the kernels of avx512_amx do not have the instructions of AMX, or others have some.
string(REPLACE "," ";" objects "${OBJECTS}")
foreach(object IN LISTS objects)
  # A whole listing is some 100 MB.
  execute_process(COMMAND ${OBJDUMP} -d --no-show-raw-insn ${object} COMMAND grep -owE "tdpbf16ps|ldtilecfg|tileloadd|tileloaddt1|tilestored|tilezero|tilerelease"
    COMMAND sort -u OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(REPLACE "\n" " " found "${found}")
  if(object MATCHES "_avx512_amx\\.o$")
    set(wanted "ldtilecfg tdpbf16ps tileloadd tileloaddt1 tilerelease tilestored tilezero")
  else()
    set(wanted "")
  endif()
  if(NOT found STREQUAL wanted)
    message(SEND_ERROR "${object}: [${found}] instead of [${wanted}]")
  endif()
endforeach()
