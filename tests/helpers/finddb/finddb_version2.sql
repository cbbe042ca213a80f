BEGIN TRANSACTION;
CREATE TABLE answer (
	problem_id INTEGER NOT NULL, 
	payload TEXT NOT NULL, 
	PRIMARY KEY (problem_id), 
	FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE
);
INSERT INTO "answer" VALUES(1,'[[{"Conv8":1},{"solvers":["Conv8"]},null,"defaults",true,"2026-01-01T00:00:18.000000Z","b90c82c126e234149520eff14c7f988d"],[{"Conv7":1},{"solvers":["Conv7"]},null,"defaults",true,"2026-01-01T00:00:17.000000Z","3aba612b6ff8fe7d3a4447e093797b8c"],[{"Conv6":1},{"solvers":["Conv6"]},null,"defaults",true,"2026-01-01T00:00:16.000000Z","3e23243a21d8941a82a35f1cf2d0be03"],[{"Conv5":1},{"solvers":["Conv5"]},null,"defaults",true,"2026-01-01T00:00:15.000000Z","a955d15d90ca000d6451e3e37121994f"],[{"Conv4":1},{"solvers":["Conv4"]},null,"defaults",true,"2026-01-01T00:00:14.000000Z","795533454d2b2b4f7f29bb77d4098852"],[{"Conv3":1},{"solvers":["Conv3"]},null,"defaults",true,"2026-01-01T00:00:13.000000Z","b70191037fdb8e9997ff4a545427e2c0"],[{"Conv2":1},{"solvers":["Conv2"]},null,"defaults",true,"2026-01-01T00:00:12.000000Z","15e81bc07cd623acee94276b4d3bc341"],[{"Conv1":1},{"solvers":["Conv1"]},null,"defaults",true,"2026-01-01T00:00:11.000000Z","039d9a38fe6f21dc742be0d144440d65"]]
["ConvA",1,"{}","ok","","","","","",1.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:01.000000Z","f82477bd09969711f2f0d225433a7e25"]
["ConvB",1,"{\"tile\":1}","ok","","","","","",2.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:02.000000Z","ec34e9dab650adb44d4a441d7930759a"]
["Conv0",1,"{}","ok","","","","","",3.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:10.000000Z","88431ecb1e0704ef21ebc47e49430649"]
["Conv1",1,"{}","ok","","","","","",4.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:11.000000Z","54673dcdbb0241effd8dcaa41f6fe6ab"]
["Conv2",1,"{}","ok","","","","","",5.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:12.000000Z","aa86f994d366c273b208adc0ad4a3304"]
["Conv3",1,"{}","ok","","","","","",6.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:13.000000Z","dadbc19abac3133f4fd83796767fcfa8"]
["Conv4",1,"{}","ok","","","","","",7.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:14.000000Z","32d67e3cbbfbae95356e6cb0e5f8201b"]
["Conv5",1,"{}","ok","","","","","",8.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:15.000000Z","344f1587db9aa7842eb579a1c3ee64b2"]
["Conv6",1,"{}","ok","","","","","",9.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:16.000000Z","9412fdd312705c59f2e21207e9d2a284"]
["Conv7",1,"{}","ok","","","","","",10.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:17.000000Z","071a6c30601c266caf7ef287124ec54a"]
["Conv8",1,"{}","ok","","","","","",11.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:18.000000Z","2f2e07a8d73fff67d94d32b1366175f6"]');
INSERT INTO "answer" VALUES(2,'[[{"ConvC":1},{},null,"defaults",true,"2026-01-01T00:00:30.000000Z","ef919262b1d2b521b9469581bbe9da73"]]
["ConvC",1,"{}","ok","","","","","",5.0,null,null,null,0,"",0,true,null,"bb0ea816841f3244","2026-01-01T00:00:30.000000Z","19be9ffdadb79f8266e6328c6ecf1933"]');
CREATE TABLE device (
	id INTEGER NOT NULL, 
	identity VARCHAR NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (identity)
);
INSERT INTO "device" VALUES(1,'NVIDIA H200|132|9.0|');
INSERT INTO "device" VALUES(2,'cpu|2||');
CREATE TABLE environment (
	id VARCHAR NOT NULL, 
	versions TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "environment" VALUES('bb0ea816841f3244','{"driver":"13.0","nvrtc":"13.0.88"}');
CREATE TABLE measurement (
	problem_id INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	solver_id VARCHAR NOT NULL, 
	solver_version BIGINT NOT NULL, 
	config TEXT NOT NULL, 
	status VARCHAR NOT NULL, 
	algorithm VARCHAR NOT NULL, 
	library VARCHAR NOT NULL, 
	source_hash VARCHAR NOT NULL, 
	kernel_hash VARCHAR NOT NULL, 
	message TEXT NOT NULL, 
	time_ms FLOAT, 
	min_ms FLOAT, 
	p20_ms FLOAT, 
	p80_ms FLOAT, 
	samples BIGINT NOT NULL, 
	protocol VARCHAR NOT NULL, 
	workspace_bytes BIGINT NOT NULL, 
	deterministic BOOLEAN NOT NULL, 
	max_error FLOAT, 
	environment VARCHAR NOT NULL, 
	created_at VARCHAR NOT NULL, 
	contended BOOLEAN DEFAULT '0' NOT NULL, 
	dropped_samples BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (problem_id, id), 
	FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE
)
 WITHOUT ROWID

;
INSERT INTO "measurement" VALUES(1,'071a6c30601c266caf7ef287124ec54a','Conv7',1,'{}','ok','','','','','',10.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:17.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'2f2e07a8d73fff67d94d32b1366175f6','Conv8',1,'{}','ok','','','','','',11.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:18.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'32d67e3cbbfbae95356e6cb0e5f8201b','Conv4',1,'{}','ok','','','','','',7.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:14.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'344f1587db9aa7842eb579a1c3ee64b2','Conv5',1,'{}','ok','','','','','',8.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:15.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'54673dcdbb0241effd8dcaa41f6fe6ab','Conv1',1,'{}','ok','','','','','',4.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:11.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'88431ecb1e0704ef21ebc47e49430649','Conv0',1,'{}','ok','','','','','',3.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:10.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'9412fdd312705c59f2e21207e9d2a284','Conv6',1,'{}','ok','','','','','',9.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:16.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'aa86f994d366c273b208adc0ad4a3304','Conv2',1,'{}','ok','','','','','',5.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:12.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'dadbc19abac3133f4fd83796767fcfa8','Conv3',1,'{}','ok','','','','','',6.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:13.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'ec34e9dab650adb44d4a441d7930759a','ConvB',1,'{"tile":1}','ok','','','','','',2.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:02.000000Z',0,0);
INSERT INTO "measurement" VALUES(1,'f82477bd09969711f2f0d225433a7e25','ConvA',1,'{}','ok','','','','','',1.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:01.000000Z',0,0);
INSERT INTO "measurement" VALUES(2,'19be9ffdadb79f8266e6328c6ecf1933','ConvC',1,'{}','ok','','','','','',5.0,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:30.000000Z',0,0);
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','2');
CREATE TABLE problem (
	id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	network_config VARCHAR NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (device_id, network_config), 
	FOREIGN KEY(device_id) REFERENCES device (id)
);
INSERT INTO "problem" VALUES(1,1,'2d-fwd-n32-c64-h56x56-k64-y3x3-pad1x1');
INSERT INTO "problem" VALUES(2,2,'1d-fwd-n1');
CREATE TABLE recheck (
	device VARCHAR NOT NULL, 
	network_config VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	created_at VARCHAR NOT NULL, 
	PRIMARY KEY (device, network_config, reason)
)
 WITHOUT ROWID

;
CREATE TABLE scope (
	problem_id INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	solvers TEXT NOT NULL, 
	filters TEXT NOT NULL, 
	workspace_limit_bytes BIGINT, 
	effort VARCHAR NOT NULL, 
	complete BOOLEAN NOT NULL, 
	created_at VARCHAR NOT NULL, 
	PRIMARY KEY (problem_id, id), 
	FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE
)
 WITHOUT ROWID

;
INSERT INTO "scope" VALUES(1,'039d9a38fe6f21dc742be0d144440d65','{"Conv1":1}','{"solvers":["Conv1"]}',NULL,'defaults',1,'2026-01-01T00:00:11.000000Z');
INSERT INTO "scope" VALUES(1,'15e81bc07cd623acee94276b4d3bc341','{"Conv2":1}','{"solvers":["Conv2"]}',NULL,'defaults',1,'2026-01-01T00:00:12.000000Z');
INSERT INTO "scope" VALUES(1,'3aba612b6ff8fe7d3a4447e093797b8c','{"Conv7":1}','{"solvers":["Conv7"]}',NULL,'defaults',1,'2026-01-01T00:00:17.000000Z');
INSERT INTO "scope" VALUES(1,'3e23243a21d8941a82a35f1cf2d0be03','{"Conv6":1}','{"solvers":["Conv6"]}',NULL,'defaults',1,'2026-01-01T00:00:16.000000Z');
INSERT INTO "scope" VALUES(1,'795533454d2b2b4f7f29bb77d4098852','{"Conv4":1}','{"solvers":["Conv4"]}',NULL,'defaults',1,'2026-01-01T00:00:14.000000Z');
INSERT INTO "scope" VALUES(1,'a955d15d90ca000d6451e3e37121994f','{"Conv5":1}','{"solvers":["Conv5"]}',NULL,'defaults',1,'2026-01-01T00:00:15.000000Z');
INSERT INTO "scope" VALUES(1,'b70191037fdb8e9997ff4a545427e2c0','{"Conv3":1}','{"solvers":["Conv3"]}',NULL,'defaults',1,'2026-01-01T00:00:13.000000Z');
INSERT INTO "scope" VALUES(1,'b90c82c126e234149520eff14c7f988d','{"Conv8":1}','{"solvers":["Conv8"]}',NULL,'defaults',1,'2026-01-01T00:00:18.000000Z');
INSERT INTO "scope" VALUES(1,'d426e67f89cfddb2c9d724b8def74c27','{"Conv0":1}','{"solvers":["Conv0"]}',NULL,'defaults',1,'2026-01-01T00:00:10.000000Z');
INSERT INTO "scope" VALUES(1,'f6eddd3ee0a3c722275adb59241e65d8','{"ConvA":1,"ConvB":1}','{}',NULL,'defaults',1,'2026-01-01T00:00:02.000000Z');
INSERT INTO "scope" VALUES(2,'ef919262b1d2b521b9469581bbe9da73','{"ConvC":1}','{}',NULL,'defaults',1,'2026-01-01T00:00:30.000000Z');
CREATE TABLE verdict (
	problem_id INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	winner TEXT NOT NULL, 
	ties TEXT NOT NULL, 
	comparisons TEXT NOT NULL, 
	blocks BIGINT NOT NULL, 
	protocol VARCHAR NOT NULL, 
	environment VARCHAR NOT NULL, 
	created_at VARCHAR NOT NULL, 
	PRIMARY KEY (problem_id, id), 
	FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE
)
 WITHOUT ROWID

;
COMMIT;
