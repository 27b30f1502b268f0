"""ib_write_bw and ib_write_lat as programs that stand for them. A server listens at its address and ends with its
client, which writes the report. What is wrong with an end is known by its address and its device.

Options, reports and what is said are those of perftest 26.07 (src/perftest_parameters.c and .h: usage,
REPORT_FMT_JSON, REPORT_FMT_LAT_JSON; _resources.c and .h, _communication.c, write_bw.c), RETRIES as before its pull
request 342 and after it; both ends of such a failure are in its issue 262."""

import json
import sys

DOWN = " Port number 1 state is Down\n Couldn't set the link layer\n Couldn't get context for the device\n"
NO_DEVICE = "IB device mlx5_1 not found\n Unable to find the Infiniband/RoCE device\n"
NO_MEMORY = "Couldn't allocate MR with error=12\nFailed to create MR\n Couldn't create IB resources\n"
NO_PD = "Couldn't allocate PD\n Couldn't create IB resources\n"
NO_GID = "Failed to modify QP 122273 to RTR\n Unable to Connect the HCA's through the link\n"
FAILED = " Failed to complete run_iter_bw function successfully\n"
RETRIES = (
    f" Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\nscnt=128, ccnt=0\n{FAILED}",
    " Completion with error at client\n Failed status-transport retry counter exceeded (12): wr_id 0 syndrom 0x81\n"
    f" scnt=128, ccnt=0\n{FAILED}",
)
OLD = "Current implementation is not compatible with versions older than 5.70\n"
LEFT = "ethernet_read_keys: Couldn't read remote address\n Failed to exchange data between server and clients\n"

# `alone`: what an end says before it listens or connects; `met`: both ends of a pair, once they have met; `memory`: an
# end, once it has met any, to which the other one says LEFT. All by "ADDRESS DEVICE".
PROGRAM = """#!{python} -IS
import json, os, socket, sys, time
about, arguments = json.loads({about!r}), sys.argv[1:]
if "--help" in arguments:
    print("      --out_json  Save the report in a json file\\n      " + about["bind"] + "  Source IP")
    sys.exit(about["help_status"])
given = dict(each.split("=", 1) for each in arguments if "=" in each)
given |= dict(zip(arguments, arguments[1:]))
own, device, service = given["--bind_source_ip"], given["-d"], given["-p"]
me, is_client = own + " " + device, "--out_json" in arguments
if given.get("-x", "3") != "3" and is_client:
    sys.exit({no_gid!r})
if me in about["alone"]:
    sys.exit(about["alone"][me])
if is_client:
    link = socket.create_connection((arguments[-1], int(service)), source_address=(own, 0))
else:
    with socket.create_server((own, int(service))) as server:
        link = server.accept()[0]
link.sendall((me + "\\n").encode())
other = link.makefile().readline().strip()
if me in about["memory"]:
    sys.exit(about["memory"][me])
if other in about["memory"]:
    sys.exit({left!r})
if (why := about["met"].get(" ".join(sorted([me, other])))) and is_client:
    time.sleep(3600 if why == "hangs" else 0)
    sys.exit(why)
if is_client:
    figure = {figure}
    with open(given["--out_json_file"], "w") as file:
        file.write(about["report"] % figure)
"""
BW = """{
"test_info": { "test": "RDMA_Write_BW_Test", "Device": "mlx5_0", "Number_of_qps": 1, "Connection_type": "RC" },
"results": { "MsgSize": 8388608, "n_iterations": 1000, "BW_peak": 0.00, "BW_average": %.2f, "MsgRate": 0.005806 }
}
"""
LAT = """{
"test_info": { "test": "RDMA_Write_Latency_Test", "Device": "mlx5_0", "Connection_type": "RC" },
"results": { "MsgSize": 2, "n_iterations": 1000, "t_min": 1.50, "t_max": 5.90, "t_typical": %.2f, "t_avg": 1.58,
"t_stdev": 0.10, "percentile_99": 1.80, "percentile_99.9": 3.20 }
}
"""
USUAL = {"bind": "--bind_source_ip", "help_status": 0, "alone": {}, "met": {}, "memory": {}, "slow": {}}


def install(folder, monkeypatch, **different):
    """Both programs on the PATH, with something different about them."""
    figures = {
        "ib_write_bw": "about['slow'].get(me, about['slow'].get(other, 389.61))",  # above oci-hpc's gate of 384
        "ib_write_lat": "1.53",
    }
    for name, report in (("ib_write_bw", BW), ("ib_write_lat", LAT)):
        about = json.dumps({"report": report, **USUAL, **different})
        program = folder / name
        text = PROGRAM.format(python=sys.executable, about=about, no_gid=NO_GID, left=LEFT, figure=figures[name])
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
