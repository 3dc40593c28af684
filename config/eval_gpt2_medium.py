# Evaluate OpenAI's GPT-2 350M (24 layers, 16 heads, 1024 channels). It trains nothing and writes nothing.
#
#   data     python prepare.py openwebtext   (or any other set with GPT-2's tokens: --dataset=shakespeare)
#   launch   python train.py config/eval_gpt2_medium.py
#   batch    8 sequences x 1,024 tokens = 8,192 tokens, 500 times
#   cost     a download of the weights, once; a forward pass over 4.1 million tokens of each split
#   loss     2.84 for validation on OpenWebText in nanoGPT's README, whose GELU is exact; OpenAI's and ours
#            here is the tanh approximation. Not measured by us

init_from = 'gpt2-medium'
eval_only = True

batch_size = 8
block_size = 1024
gradient_accumulation_steps = 1  # there is no update
eval_iters = 500
