#pragma once
// An H200 and a B200 as cuDNN describes devices (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION), from their data
// sheets.

namespace nrl {

inline constexpr char h200_json[] = R"({
  "deviceName": "NVIDIA H200", "cudaDeviceId": 0, "deviceVer": 900, "multiProcessorCount": 132,
  "driverVer": 13000, "maxSharedMemoryPerBlockOptin": 232448, "totalGlobalMem": 150754820096,
  "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
  "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
  "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
  "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1980000,
  "memClockRateKHz": 3201000, "l2CacheSize": 62914560
})";
inline constexpr int h200_capability = 90;

inline constexpr char b200_json[] = R"({
  "deviceName": "NVIDIA B200", "cudaDeviceId": 0, "deviceVer": 1000, "multiProcessorCount": 148,
  "driverVer": 13000, "maxSharedMemoryPerBlockOptin": 232448, "totalGlobalMem": 191510282240,
  "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
  "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
  "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
  "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1965000,
  "memClockRateKHz": 3996000, "l2CacheSize": 132644864
})";
inline constexpr int b200_capability = 100;

}  // namespace nrl
