/* Stands in for NVIDIA's driver library where there is none, so that CUDA builds can be loaded: every call answers that
   there is no device. These are the functions that vLLM's, torch's and FlashInfer's libraries are linked against. */
#define CUDA_ERROR_NO_DEVICE 100
#define ANSWER(name) int name(void) { return CUDA_ERROR_NO_DEVICE; }

ANSWER(cuCtxGetCurrent)
ANSWER(cuCtxSetCurrent)
ANSWER(cuDeviceGetAttribute)
ANSWER(cuDevicePrimaryCtxRetain)
ANSWER(cuGetErrorString)
ANSWER(cuGetProcAddress_v2)
ANSWER(cuInit)
ANSWER(cuMemAddressFree)
ANSWER(cuMemAddressReserve)
ANSWER(cuMemCreate)
ANSWER(cuMemGetAllocationGranularity)
ANSWER(cuMemMap)
ANSWER(cuMemRelease)
ANSWER(cuMemSetAccess)
ANSWER(cuMemUnmap)
ANSWER(cuPointerGetAttribute)
ANSWER(cuTensorMapEncodeTiled)
