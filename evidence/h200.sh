#!/bin/sh
# Makes evidence/h200.jsonl: run from the root of a checkout, alone on an H200, where nibblas and the peers can be imported.
#   sh evidence/h200.sh [FILE]          some minutes, most of it compilers; FILE is appended to
set -e
file=${1:-evidence/h200.jsonl}
bench() { "${PYTHON:-python3}" -m nibblas bench --device cuda --output "$file" "$@"; }

large=7168x16384,4096x7168,7168x2048
small=2112x7168,2880x512,3072x1536
prepacked=cuda_linear_sm90_nvfp4,cuda_linear_sm90_mxfp4
wide=cuda_linear_wide_sm90_nvfp4,cuda_linear_wide_sm90_mxfp4
decoded=triton_linear_decoded_sm90_nvfp4,triton_linear_decoded_sm90_mxfp4

bench --shapes $large --M 1,8,16,32,64 --kernels $prepacked --peers humming,cublas --seconds 0.3
bench --shapes $small --M 1,8,16,32,64 --kernels $prepacked --peers humming,cublas --seconds 0.3
bench --op quantize --shapes 4096x7168 --seconds 0.3
bench --shapes 7168x16384,4096x7168 --M 1,2,4 --formats nvfp4 --activations fp4 --seconds 0.3 \
    --kernels cuda_linear_fp4_sm90,triton_linear
bench --shapes $large,$small --M 1,8,16,32,64 --formats nvfp4 --kernels cuda_linear_sm90_nvfp4 --seconds 0.2 \
    --dependent-launch
many=$prepacked,$wide,$decoded
bench --shapes $large --M 48,64,96,128,192,256,512 --kernels $many --peers humming,cublas --seconds 0.15
bench --shapes 7168x16384,4096x7168 --M 1024,2048 --kernels $many --peers humming,cublas --seconds 0.15
bench --shapes $small --M 48,64,96,128,256,512 --kernels $many --peers humming,cublas --seconds 0.15
bench --shapes 7168x16384,4096x7168 --M 1,16,64 --formats mxfp4 --kernels $prepacked --peers gemlite --seconds 0.3
bench --shapes 7168x16384,4096x7168 --M 1,64 --formats nvfp4 --kernels triton_linear,torch_linear --seconds 0.3
bench --shapes $large --M 128,512 --formats nvfp4 --activations fp4 --kernels triton_linear,triton_linear_fp4_decoded \
    --seconds 0.15
bench --op gated_linear --shapes 4096x7168 --M 64,256 --formats nvfp4 --activations fp4 --seconds 0.15 \
    --kernels triton_gated_linear,triton_gated_linear_fp4_decoded
bench --op grouped_linear --G 32 --shapes 2048x2048 --M 4,32,256 --seconds 0.15 \
    --kernels triton_grouped_linear,composite_grouped_linear
bench --shapes 4096x7168 --L 8 --M 1,8 --formats nvfp4 --activations fp4 --kernels cuda_linear_fp4_sm90,triton_linear \
    --seconds 0.15
