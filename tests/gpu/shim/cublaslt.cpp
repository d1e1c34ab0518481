// cuBLASLt on the host: what its header promises, column by column, with sums in double. It refuses what
// the header forbids, offers several algorithms with different demands, and remembers what it was asked.
#include <cmath>
#include <cstring>
#include <vector>

#if defined(REAL_HEADER)
#include <cublasLt.h>
#else
#include "cublaslt_declared.h"
#endif

namespace {

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
};

struct Desc {
    int compute, scale;
    int32_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_ld = 0;
};

struct Pref {
    uint64_t workspace = 0;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256;
};

// What an algorithm wants: reduction scheme, workspace, alignment of matrices, and of bias and aux. `breaks`:
// it is offered, but fails when it is started; `state`: it is listed as unfit.
struct Algorithm {
    uint32_t reduction;
    uint64_t workspace, alignment, extras;
    bool breaks;
    int state;
};
const Algorithm algorithms[] = {
    {CUBLASLT_REDUCTION_SCHEME_INPLACE, 1024, 16, 16, false, CUBLAS_STATUS_SUCCESS},
    {CUBLASLT_REDUCTION_SCHEME_NONE, uint64_t(1) << 30, 2, 2, false, CUBLAS_STATUS_SUCCESS},
    {CUBLASLT_REDUCTION_SCHEME_NONE, 0, 16, 16, false, CUBLAS_STATUS_NOT_SUPPORTED},
    {CUBLASLT_REDUCTION_SCHEME_NONE, 0, 256, 16, false, CUBLAS_STATUS_SUCCESS},
    {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 4096, 16, 16, false, CUBLAS_STATUS_SUCCESS},
    {CUBLASLT_REDUCTION_SCHEME_NONE, 0, 16, 2, true, CUBLAS_STATUS_SUCCESS},
    {CUBLASLT_REDUCTION_SCHEME_NONE, 0, 2, 2, false, CUBLAS_STATUS_SUCCESS},
    {4, 4096, 2, 16, false, CUBLAS_STATUS_SUCCESS},  // parts in the type of the output
};
constexpr uint64_t MARK = 0x616c676f72697468;
struct {
    int live = 0, invalid = 0, started = 0, searches = 0, pointed = 0;
    int algorithm = -1;
    void* stream = nullptr;
    uint32_t refused = 0;
    Pref pref;  // of the last search
} seen;

cublasStatus_t status(int code) {
    seen.invalid += code == CUBLAS_STATUS_INVALID_VALUE;
    return cublasStatus_t(code);
}

cublasStatus_t invalid() { return status(CUBLAS_STATUS_INVALID_VALUE); }

template <class T>
T* own(const void* opaque) {
    return static_cast<T*>(const_cast<void*>(opaque));
}

template <class Opaque, class T>
cublasStatus_t made(Opaque* where, T* object) {
    *where = reinterpret_cast<Opaque>(object);
    ++seen.live;
    return status(CUBLAS_STATUS_SUCCESS);
}

template <class T>
cublasStatus_t destroyed(void* opaque) {
    if (opaque == nullptr) return invalid();
    delete own<T>(opaque);
    --seen.live;
    return status(CUBLAS_STATUS_SUCCESS);
}

template <class T>
cublasStatus_t taken(T& field, const void* buf, size_t size) {
    if (buf == nullptr || size != sizeof(T)) return invalid();
    std::memcpy(&field, buf, size);
    return status(CUBLAS_STATUS_SUCCESS);
}

size_t size_of(int type) { return type == CUDA_R_16BF ? 2 : type == CUDA_R_32F ? 4 : 8; }

double load(const void* at, int type, size_t index) {
    if (type == CUDA_R_64F) return static_cast<const double*>(at)[index];
    if (type == CUDA_R_32F) return static_cast<const float*>(at)[index];
    uint32_t bits = uint32_t(static_cast<const uint16_t*>(at)[index]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

void store(void* at, int type, size_t index, double value) {
    if (type == CUDA_R_64F) {
        static_cast<double*>(at)[index] = value;
    } else if (type == CUDA_R_32F) {
        static_cast<float*>(at)[index] = float(value);
    } else {  // to the nearest bfloat16, ties to even
        float x = float(value);
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        bits += 0x7fff + (bits >> 16 & 1);
        static_cast<uint16_t*>(at)[index] = std::isnan(x) ? 0x7fc0 : uint16_t(bits >> 16);
    }
}

double as_tf32(double value) {  // eleven significant bits
    int exponent;
    double fraction = std::frexp(value, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11);
}

const double ROOT = std::sqrt(2 / M_PI);

double gelu(double x) { return x / 2 * (1 + std::tanh(ROOT * (x + 0.044715 * x * x * x))); }

double gelu_derivative(double x) {
    double t = std::tanh(ROOT * (x + 0.044715 * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * ROOT * (1 + 3 * 0.044715 * x * x);
}

bool adds_bias(uint32_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

bool has_bias(uint32_t epilogue) { return adds_bias(epilogue) || epilogue == CUBLASLT_EPILOGUE_BGRADB; }

bool is_gelu(uint32_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

bool has_aux(uint32_t epilogue) { return is_gelu(epilogue) || epilogue == CUBLASLT_EPILOGUE_DGELU; }

int fits(const Desc* op, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
    if (!op || !a || !b || !c || !d) return CUBLAS_STATUS_INVALID_VALUE;
    for (const Layout* x : {a, b, c, d})
        if (x->ld < int64_t(x->rows)) return CUBLAS_STATUS_INVALID_VALUE;
    bool ta = op->transa == CUBLAS_OP_T, tb = op->transb == CUBLAS_OP_T;
    uint64_t m = ta ? a->cols : a->rows, k = ta ? a->rows : a->cols;
    uint64_t k_of_b = tb ? b->cols : b->rows, n = tb ? b->rows : b->cols;
    if (k != k_of_b || d->rows != m || d->cols != n || c->rows != m || c->cols != n || c->type != d->type)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (has_bias(op->epilogue) && !op->bias) return CUBLAS_STATUS_INVALID_VALUE;
    if (has_aux(op->epilogue) && (!op->aux || op->aux_ld < int64_t(m) || op->aux_ld % 8))
        return CUBLAS_STATUS_INVALID_VALUE;
    bool is32 = op->compute == CUBLAS_COMPUTE_32F && op->scale == CUDA_R_32F;
    bool is_tf32 = op->compute == CUBLAS_COMPUTE_32F_FAST_TF32 && op->scale == CUDA_R_32F;
    bool is64 = op->compute == CUBLAS_COMPUTE_64F && op->scale == CUDA_R_64F;
    bool half = a->type == CUDA_R_16BF && is32 && d->type != CUDA_R_64F;
    bool single = a->type == CUDA_R_32F && (is32 || is_tf32) && d->type == CUDA_R_32F;
    bool whole = a->type == CUDA_R_64F && is64 && d->type == CUDA_R_64F;
    if (a->type != b->type || !(half || single || whole)) return CUBLAS_STATUS_NOT_SUPPORTED;
    return op->epilogue == seen.refused ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

bool aligned(const void* at, uint64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; }

// Row by row as the product needs it, in double.
std::vector<double> unpacked(const void* at, const Layout* x, bool rows, bool tf32) {
    size_t height = rows ? x->rows : x->cols, width = rows ? x->cols : x->rows;
    std::vector<double> values(height * width);
    for (size_t i = 0; i < height; ++i)
        for (size_t j = 0; j < width; ++j) {
            double value = load(at, x->type, rows ? i + j * x->ld : j + i * x->ld);
            values[i * width + j] = tf32 ? as_tf32(value) : value;
        }
    return values;
}

void multiply(const Desc* op, double alpha, double beta, const void* A, const Layout* a, const void* B,
              const Layout* b, const void* C, const Layout* c, void* D, const Layout* d) {
    bool ta = op->transa == CUBLAS_OP_T, tb = op->transb == CUBLAS_OP_T;
    bool tf32 = op->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    size_t m = d->rows, n = d->cols, k = ta ? a->rows : a->cols;
    const auto left = unpacked(A, a, !ta, tf32), right = unpacked(B, b, tb, tf32);
    for (size_t j = 0; j < n; ++j)
        for (size_t i = 0; i < m; ++i) {
            double value = 0;
            for (size_t l = 0; l < k; ++l) value += left[i * k + l] * right[j * k + l];
            value *= alpha;
            if (beta != 0) value += beta * load(C, c->type, i + j * c->ld);
            if (adds_bias(op->epilogue)) value += load(op->bias, d->type, i);
            if (is_gelu(op->epilogue)) {
                store(op->aux, d->type, i + j * op->aux_ld, value);
                value = gelu(value);
            } else if (op->epilogue == CUBLASLT_EPILOGUE_DGELU) {
                value *= gelu_derivative(load(op->aux, d->type, i + j * op->aux_ld));
            }
            store(D, d->type, i + j * d->ld, value);
        }
    if (op->epilogue == CUBLASLT_EPILOGUE_BGRADB)
        for (size_t j = 0; j < n; ++j) {
            double sum = 0;
            for (size_t l = 0; l < k; ++l) sum += right[j * k + l];
            store(op->bias, d->type, j, sum);
        }
}

}  // namespace

extern "C" {

int shim_live() { return seen.live; }
int shim_invalid() { return seen.invalid; }
int shim_started() { return seen.started; }
int shim_searches() { return seen.searches; }
int shim_pointed() { return seen.pointed; }
int shim_algorithm() { return seen.algorithm; }
uint32_t shim_alignment(int of_b) { return of_b ? seen.pref.align_b : seen.pref.align_a; }
void* shim_stream() { return seen.stream; }
void shim_refuse(uint32_t epilogue) { seen.refused = epilogue; }

size_t cublasLtGetVersion(void) { return 131000; }

const char* cublasLtGetStatusName(cublasStatus_t code) {
    return code == CUBLAS_STATUS_NOT_SUPPORTED      ? "CUBLAS_STATUS_NOT_SUPPORTED"
           : code == CUBLAS_STATUS_INVALID_VALUE    ? "CUBLAS_STATUS_INVALID_VALUE"
           : code == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED"
                                                    : "another status";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return made(handle, new char); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroyed<char>(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType scale) {
    return made(desc, new Desc{int(compute), int(scale)});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return destroyed<Desc>(desc); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attr,
                                              const void* buf, size_t size) {
    Desc* op = own<Desc>(desc);
    switch (attr) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return taken(op->transa, buf, size);
        case CUBLASLT_MATMUL_DESC_TRANSB: return taken(op->transb, buf, size);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return taken(op->epilogue, buf, size);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: ++seen.pointed; return taken(op->bias, buf, size);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: ++seen.pointed; return taken(op->aux, buf, size);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return taken(op->aux_ld, buf, size);
        default: return invalid();
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    return made(layout, new Layout{int(type), rows, cols, ld});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return destroyed<Layout>(layout);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* pref) {
    return made(pref, new Pref);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t pref) {
    return destroyed<Pref>(pref);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void* buf, size_t size) {
    Pref* p = own<Pref>(pref);
    switch (attr) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return taken(p->workspace, buf, size);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return taken(p->reductions, buf, size);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return taken(p->align_a, buf, size);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return taken(p->align_b, buf, size);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return taken(p->align_c, buf, size);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return taken(p->align_d, buf, size);
        default: return invalid();
    }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t pref, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    ++seen.searches;
    const Desc* op = own<Desc>(desc);
    int code = fits(op, own<Layout>(a), own<Layout>(b), own<Layout>(c), own<Layout>(d));
    *found = 0;
    if (code != CUBLAS_STATUS_SUCCESS || wanted < 1) return status(wanted < 1 ? 7 : code);
    const Pref* p = &(seen.pref = *own<Pref>(pref));
    for (size_t i = 0; i < std::size(algorithms) && *found < wanted; ++i) {
        const Algorithm& one = algorithms[i];
        bool able = one.workspace <= p->workspace && (one.reduction == 0 || one.reduction & p->reductions);
        for (uint32_t known : {p->align_a, p->align_b, p->align_c, p->align_d})
            able &= known >= one.alignment;
        if (has_aux(op->epilogue)) able &= aligned(op->aux, one.extras);
        if (has_bias(op->epilogue)) able &= aligned(op->bias, one.extras);
        if (!able) continue;
        cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
        std::memset(&result, 0, sizeof result);
        result.algo.data[0] = MARK;
        result.algo.data[7] = i;
        result.workspaceSize = one.workspace;
        result.state = cublasStatus_t(one.state);
    }
    return status(CUBLAS_STATUS_SUCCESS);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t bytes,
                              cudaStream_t stream) {
    if (handle == nullptr) return status(CUBLAS_STATUS_NOT_INITIALIZED);
    if (!A || !B || !C || !D || !alpha || !beta || algo == nullptr || algo->data[0] != MARK) return invalid();
    const Desc* op = own<Desc>(desc);
    int code = fits(op, own<Layout>(a), own<Layout>(b), own<Layout>(c), own<Layout>(d));
    if (code != CUBLAS_STATUS_SUCCESS) return status(code);
    const Algorithm& one = algorithms[algo->data[7]];
    if (one.breaks) return status(CUBLAS_STATUS_EXECUTION_FAILED);
    for (const void* at : {A, B, C, const_cast<const void*>(D)})
        if (!aligned(at, one.alignment)) return invalid();
    for (const Layout* x : {own<Layout>(a), own<Layout>(b), own<Layout>(d)})
        if (x->ld * size_of(x->type) % one.alignment) return invalid();
    if (has_aux(op->epilogue) && !aligned(op->aux, one.extras)) return invalid();
    if (has_bias(op->epilogue) && !aligned(op->bias, one.extras)) return invalid();
    if (bytes < one.workspace || (bytes && !workspace)) return invalid();
    std::memset(workspace, 0xff, one.workspace);
    multiply(op, load(alpha, op->scale, 0), load(beta, op->scale, 0), A, own<Layout>(a), B, own<Layout>(b), C,
             own<Layout>(c), D, own<Layout>(d));
    ++seen.started;
    seen.algorithm = int(algo->data[7]);
    seen.stream = stream;
    return status(CUBLAS_STATUS_SUCCESS);
}
}
