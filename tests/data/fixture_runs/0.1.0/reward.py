def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ord((solution_str or "a")[0]) % 2)
