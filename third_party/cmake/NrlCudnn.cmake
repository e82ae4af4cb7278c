# cuDNN's headers and its header-only C++ interface (the Python wheel nvidia-cudnn-frontend has it). Sets
# NRL_CUDNN_INCLUDE and NRL_CUDNN_FRONTEND_INCLUDE, or stops and says how to get them.
# 1.24 lets through what later ones refuse (statistics that are not packed): the tests compare it with a later one.
set(NRL_CUDNN_FRONTEND_OLDEST 1.24)
set(NRL_CUDNN_FRONTEND_NEWEST 1.32.0)
set(NRL_CUDNN_FRONTEND_DIR "" CACHE PATH "Where cudnn_frontend.h is; empty: look for it")
set(NRL_CUDNN_FRONTEND_NEWEST_DIR "" CACHE PATH
  "Where cudnn_frontend.h of a later version is, for tests only; empty: look for it")

find_path(NRL_CUDNN_INCLUDE cudnn.h HINTS ${NRL_CUDNN_ROOT} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
if(NOT NRL_CUDNN_LIBRARY OR NOT NRL_CUDNN_INCLUDE)
  message(FATAL_ERROR "There is a CUDA toolkit, but no cuDNN 9 beside it: install it (package cudnn9-cuda-13 of NVIDIA's "
    "repository), or say -DNRL_CUDNN_ROOT=DIR, or configure with -DNRL_CUDA=OFF")
endif()

set(places ${NRL_CUDNN_FRONTEND_DIR} ${NRL_CUDNN_FRONTEND_DIR}/include)
if(NOT NRL_CUDNN_FRONTEND_DIR)
  # Where scripts/install-deps.sh puts it, then where pip does.
  set(places ${CMAKE_SOURCE_DIR}/build/third_party/cudnn-frontend/include)
  execute_process(COMMAND python3 -c
    "import importlib.metadata as m; print(m.distribution('nvidia-cudnn-frontend').locate_file('include'))"
    OUTPUT_VARIABLE place OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    list(APPEND places ${place})
  endif()
endif()
unset(NRL_CUDNN_FRONTEND_INCLUDE CACHE)
find_path(NRL_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h PATHS ${places} NO_DEFAULT_PATH)
set(get_it "run scripts/install-deps.sh, or: python3 -m pip install --no-deps --target build/third_party/cudnn-frontend "
  "'nvidia-cudnn-frontend>=${NRL_CUDNN_FRONTEND_OLDEST}'; or say -DNRL_CUDNN_FRONTEND_DIR=DIR, or configure with -DNRL_CUDA=OFF")
list(JOIN get_it "" get_it)
if(NOT NRL_CUDNN_FRONTEND_INCLUDE)
  message(FATAL_ERROR "A build for GPUs needs cuDNN's C++ headers (cudnn_frontend.h): ${get_it}")
endif()
file(STRINGS ${NRL_CUDNN_FRONTEND_INCLUDE}/cudnn_frontend_version.h lines REGEX "define CUDNN_FRONTEND_(MAJOR|MINOR)_VERSION")
string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
list(JOIN numbers "." NRL_CUDNN_FRONTEND_VERSION)
if(NRL_CUDNN_FRONTEND_VERSION VERSION_LESS NRL_CUDNN_FRONTEND_OLDEST)
  message(FATAL_ERROR "cuDNN's C++ headers in ${NRL_CUDNN_FRONTEND_INCLUDE} are ${NRL_CUDNN_FRONTEND_VERSION}, older than "
    "${NRL_CUDNN_FRONTEND_OLDEST}: ${get_it}")
endif()
message(STATUS "cuDNN's C++ headers ${NRL_CUDNN_FRONTEND_VERSION}: ${NRL_CUDNN_FRONTEND_INCLUDE}")

set(places ${NRL_CUDNN_FRONTEND_NEWEST_DIR} ${NRL_CUDNN_FRONTEND_NEWEST_DIR}/include)
if(NOT NRL_CUDNN_FRONTEND_NEWEST_DIR)
  set(places ${CMAKE_SOURCE_DIR}/build/third_party/cudnn-frontend-newest/include)
endif()
unset(NRL_CUDNN_FRONTEND_NEWEST_INCLUDE CACHE)
find_path(NRL_CUDNN_FRONTEND_NEWEST_INCLUDE cudnn_frontend.h PATHS ${places} NO_DEFAULT_PATH)
if(NRL_CUDNN_FRONTEND_NEWEST_INCLUDE)
  message(STATUS "cuDNN's C++ headers for tests: ${NRL_CUDNN_FRONTEND_NEWEST_INCLUDE}")
else()
  message(STATUS "cuDNN's C++ headers are tested in one version only. For a later one: python3 -m pip install --no-deps "
    "--target build/third_party/cudnn-frontend-newest nvidia-cudnn-frontend==${NRL_CUDNN_FRONTEND_NEWEST}")
endif()
