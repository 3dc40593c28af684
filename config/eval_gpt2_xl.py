# Evaluate OpenAI's GPT-2 1558M (48 layers, 25 heads, 1600 channels). Nothing is trained or written.
#
#   data     python prepare.py openwebtext   (or another dataset with GPT-2's tokens: --dataset=shakespeare)
#   launch   python train.py config/eval_gpt2_xl.py
#   batch    8 sequences x 1,024 tokens = 8,192 tokens, 500 times
#   cost     the weights are downloaded once; a forward pass over 4.1 million tokens of each split
#   loss     validation 2.54 on OpenWebText (nanoGPT's README, with the exact GELU; here it is OpenAI's tanh
#            approximation): docs/reading_logs.md, OpenAI's weights on OpenWebText

init_from = 'gpt2-xl'
eval_only = True

batch_size = 8
block_size = 1024
gradient_accumulation_steps = 1
eval_iters = 500
