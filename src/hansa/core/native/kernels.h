/* The table of one instruction set; included last by each isa_*.c. */
#include "crc.h"
#include "digest.h"
#include "gram.h"
#include "bit_planes.h"
#include "bit_planes_read.h"
#include "rows.h"
#include "spread.h"
#include "network.h"
#include "wire.h"
#include "cohort.h"
#include "lazy_cohort.h"

const hansa_kernels HANSA_KERNELS = {
    .name = HANSA_NAME,
    .network_new = network_new,
    .network_free = network_free,
    .train = train,
    .train_clients = train_clients,
    .run_cohort = run_cohort,
    .run_lazy_cohort = run_lazy_cohort,
    .combine_changes = combine_changes,
    .squared_spread = squared_spread,
    .choose = choose,
    .draw = draw_clients,
    .gradient = gradient,
    .evaluate = evaluate,
    .logits = logits,
    .server32 = server32,
    .server64 = server64,
    .mean32 = mean32,
    .mean64 = mean64,
    .mix32 = mix32,
    .mix64 = mix64,
    .gram32 = gram32,
    .gram32_add = gram32_add,
    .rows_add = rows_gram,
    .gram32_sum = gram32_sum,
    .gram = gram,
    .squares32 = squares32,
    .squares64 = squares64,
    .digest = digest,
    .sign_pack = sign_pack,
    .sign_add = sign_add,
    .reaching = reaching,
    .crc32 = crc32_fold,
    .highest32 = highest32,
    .half_pack = half_pack,
    .levels_pack = levels_pack,
    .planes_pack = planes_pack,
    .half_check = half_check,
    .half_unpack = half_unpack,
    .levels_check = levels_check,
    .levels_unpack = levels_unpack,
    .planes_unpack = planes_unpack,
    .numbers_write = numbers_write,
};
