"""Compares Quire with other engines in the types that people serve: 16, 8 and 4 bits.

loads          the work: requests at once, and one stream at a time
variants       an engine with weights of one type
environments   where the other engines are, and their versions
checkpoints    the model in the format of each engine
serving        runs the loads in a child process, for all engines
quire_engine, vllm_engine, openvino_engine, llama_server
               the engines that such processes run
llama_bench    llama.cpp's own benchmark, a command per load
bandwidth      the machine's read bandwidth, in a child process as well
start          starts a variant
rounds         runs all rounds of the variants of one type
table          the table and its targets
"""
