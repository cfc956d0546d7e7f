"""A load client for any OpenAI-compatible server: ``octavo bench serve``.

workload   what is asked: prompts, lengths, prefixes, schemas     (a pure function of the seed)
arrivals   when it is asked                                       (likewise)
server     how this server wants to be asked: model, fields, prompts as ids or as text
http       one connection; sse: the events in its bytes
sample     one request as its client saw it, event by event
runner     sends a workload and watches what that costs the client
measures   figures of samples: TTFT, TPOT, ITL, E2E, throughput, goodput, failures
tables     figures for people; plot: for their eyes; compare: of two runs
"""
